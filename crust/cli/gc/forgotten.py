"""What may be forgotten: publishes whose pod's directory is gone. A kubelet removes it when it has forgotten the pod.

A kubelet's paths of a raw block volume, below plugins/kubernetes.io/csi/volumeDevices:

    staging/<pv>, publish/<pv>/<pod uid>   where the driver stages and publishes
    <pv>/dev/<pod uid>                     the kubelet's own bind of the target, and its loop device upon that
    <pv>/data/vol_data.json                which volume of which driver it is; written at each attempt
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from crust.cli.inspecting import views

_DEVICES = "plugins/kubernetes.io/csi/volumeDevices"
SHIMS = re.compile(r"/volumeDevices/(staging|publish)/crust-[0-9a-f]{40}(/|$)")
"""Private paths of a shim, whose driver stages and publishes a deferred volume there."""
_UID = re.compile(r"[0-9A-Za-z][0-9A-Za-z.-]*")


@dataclass(frozen=True, slots=True)
class ForgottenPublish:
    """A publish without a pod. `driver` and `volume_id` are empty where nothing says which volume it is.

    `mapped` (the kubelet's bind), `staging` and `data` belong to a raw volume; a deferred one has none of them.
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
        """The directory that the kubelet has as long as it knows the pod."""
        return f"{self.pods}/{self.pod_uid}"


def find(kubelet_root: str, entries: Iterable[views.Volume]) -> tuple[ForgottenPublish, ...]:
    """All of them; none without the directory of all pods: the kubelet's root is not mounted then. Blocks."""
    if not os.path.isdir(f"{kubelet_root}/pods"):
        return ()
    found = (*_raw(kubelet_root), *_deferred(kubelet_root, entries))
    return tuple(publish for publish in found if is_absent(publish.pod_directory))


def is_absent(path: str) -> bool:
    """Whether nothing is at the path. `os.path.lexists` says so too where it may not look, or the disk fails."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _raw(root: str) -> Iterator[ForgottenPublish]:
    base = f"{root}/{_DEVICES}"
    published = {(path.parent.name, path.name) for path in Path(f"{base}/publish").glob("*/*")}
    mapped = {(path.parents[1].name, path.name) for path in Path(base).glob("*/dev/*")}
    for pv, uid in sorted(published | mapped):
        if SHIMS.search(f"{base}/publish/{pv}") or not _UID.fullmatch(uid):
            continue
        data = f"{base}/{pv}/data/vol_data.json"
        driver, volume_id = _volume(data)
        yield ForgottenPublish(
            kind="raw volume",
            driver=driver,
            volume_id=volume_id,
            pod_uid=uid,
            pods=f"{root}/pods",
            target=f"{base}/publish/{pv}/{uid}",
            mapped=f"{base}/{pv}/dev/{uid}",
            staging=f"{base}/staging/{pv}",
            data=data,
        )


def _deferred(root: str, entries: Iterable[views.Volume]) -> Iterator[ForgottenPublish]:
    for entry in entries:
        if entry.pod_uid and entry.target_path.startswith(f"{root}/pods/{entry.pod_uid}/"):
            yield ForgottenPublish(
                kind="deferred volume",
                driver=entry.driver,
                volume_id=entry.volume_id,
                pod_uid=entry.pod_uid,
                pods=f"{root}/pods",
                target=entry.target_path,
            )


def other_pods(publish: ForgottenPublish) -> tuple[str, ...]:
    """The UIDs of other pods at which the raw volume is published or bound. Blocks."""
    directories = (os.path.dirname(publish.target), os.path.dirname(publish.mapped))
    found = {path.name for directory in directories for path in Path(directory).glob("*")}
    return tuple(sorted(found - {publish.pod_uid}))


def _volume(data: str) -> tuple[str, str]:
    try:
        found = json.loads(Path(data).read_text(encoding="utf-8"))
        return str(found["driverName"]), str(found["volumeHandle"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""
