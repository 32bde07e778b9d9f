"""Publishes whose pod's directory is gone, which a kubelet removes when it has forgotten the pod.

A kubelet's paths of a raw block volume, below plugins/kubernetes.io/csi/volumeDevices:

    staging/<pv>, publish/<pv>/<pod uid>   where the driver stages and publishes
    <pv>/dev/<pod uid>                     the kubelet's own bind of the target, and its loop device upon that
    <pv>/data/vol_data.json                the driver and the volume's id; written at each attempt
"""

import errno
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from crust.core import volumes
from crust.csi_shim.wrap import private_directories
from crust.host import answers
from crust.host.files import listing
from crust.host.process import syscalls
from crust.inspection import views

_UID = re.compile(r"[0-9A-Za-z][0-9A-Za-z.-]*")


@dataclass(frozen=True, slots=True)
class ForgottenPublish:
    """A publish without a pod. `driver` and `volume_id` are empty if no file names the volume.

    `mapped` (the kubelet's bind), `staging` and `data` are empty for a deferred volume.
    """

    kind: str
    driver: str
    volume_id: str
    pod_uid: str
    pods: str
    target: str
    mapped: str = ""
    staging: str = ""
    data: str = ""

    @property
    def pod_directory(self) -> str:
        """The directory of the pod, as long as the kubelet knows the pod."""
        return f"{self.pods}/{self.pod_uid}"

    def pod(self) -> answers.Answer[os.stat_result]:
        """That directory. Blocks."""
        path = self.pod_directory
        return answers.ask(path, lambda: os.lstat(path), absent=(errno.ENOENT,))


def find(kubelet_root: str, entries: Iterable[views.VolumeRow]) -> tuple[ForgottenPublish, ...]:
    """All such publishes, with those whose pod is not seen, which the proof keeps; empty without the directory of all
    pods: the kubelet's root is not mounted then. Blocks.

    Raises `CrustError` for another path that cannot be read: a pod may have the volume there.
    """
    if not listing.exists(f"{kubelet_root}/pods/"):
        return ()
    publishes, pods = [], f"{kubelet_root}/pods"
    base = private_directories.root(kubelet_root)
    published = {
        (pv, uid) for pv in _names(f"{base}/publish") for uid in _names(f"{base}/publish/{pv}")
    }
    mapped = {(pv, uid) for pv in _names(base) for uid in _names(f"{base}/{pv}/dev")}
    for pv, uid in sorted(published | mapped):
        if volumes.is_private(f"{base}/publish/{pv}") or not _UID.fullmatch(uid):
            continue
        data = f"{base}/{pv}/data/vol_data.json"
        driver = volume_id = ""
        unnamed = suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError)
        with syscalls.translating(f"cannot read {data}"), unnamed:
            content = json.loads(Path(data).read_text(encoding="utf-8"))
            driver, volume_id = str(content["driverName"]), str(content["volumeHandle"])
        raw = ForgottenPublish(
            kind="raw volume",
            driver=driver,
            volume_id=volume_id,
            pod_uid=uid,
            pods=pods,
            target=f"{base}/publish/{pv}/{uid}",
            mapped=f"{base}/{pv}/dev/{uid}",
            staging=f"{base}/staging/{pv}",
            data=data,
        )
        publishes.append(raw)
    for entry in entries:
        uid, target = entry.pod_uid, entry.target_path
        if uid and target.startswith(f"{pods}/{uid}/"):
            kind = "deferred volume"
            deferred = ForgottenPublish(kind, entry.driver, entry.volume_id, uid, pods, target)
            publishes.append(deferred)
    return tuple(each for each in publishes if not isinstance(each.pod(), answers.Present))


def other_pods(publish: ForgottenPublish) -> tuple[str, ...]:
    """The UIDs of other pods for which the raw volume is published or bound. Blocks. Raises as `find`."""
    directories = (os.path.dirname(publish.target), os.path.dirname(publish.mapped))
    uids = {uid for directory in directories for uid in _names(directory)}
    return tuple(sorted(uids - {publish.pod_uid}))


def _names(directory: str) -> list[str]:
    with syscalls.translating(f"cannot list {directory}"):
        return syscalls.names_in(directory)
