"""The kubelet's directories: where a volume is staged and published, and the file that survives its restart.

Directories are removed by rmdir alone, as the kubelet does it: anything left in one makes the teardown fail for ever.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.kubelet.state import Pod, Volume

_DATA = "vol_data.json"


class NotRemoved(Exception):
    """A directory of a volume cannot be removed: it holds something."""


@dataclass(frozen=True)
class Found:
    """A volume of a pod that a restarted kubelet finds on disk."""

    pod_uid: str
    volume_name: str
    handle: str
    target: str


class Disk:
    """Paths below the kubelet's root."""

    def __init__(self, root: str, driver: str, is_mount_point: Callable[[str], bool]) -> None:
        self._root = root
        self._driver = driver
        self.is_mount_point = is_mount_point

    def staging(self, handle: str) -> str:
        """The global mount of a volume."""
        digest = hashlib.sha256(handle.encode()).hexdigest()
        return f"{self._root}/plugins/kubernetes.io/csi/{self._driver}/{digest}/globalmount"

    def target(self, pod_uid: str, volume_name: str) -> str:
        """The target path of a pod's volume."""
        return f"{self._root}/pods/{pod_uid}/volumes/kubernetes.io~csi/{volume_name}/mount"

    def save_staging(self, volume: Volume) -> None:
        """Make the global mount's directory and its vol_data.json."""
        path = self.staging(volume.handle)
        os.makedirs(path, 0o750, exist_ok=True)
        self._save(path, volume)

    def save_target(self, pod: Pod, volume: Volume) -> None:
        """Make the target's parent and its vol_data.json. The target itself is the driver's to make."""
        path = self.target(pod.uid, volume.name)
        os.makedirs(os.path.dirname(path), 0o750, exist_ok=True)
        self._save(path, volume)

    def saved_handle(self, path: str) -> str | None:
        """What vol_data.json beside a target or a global mount says; None without one."""
        try:
            text = (Path(path).parent / _DATA).read_text("utf-8")
        except FileNotFoundError:
            return None
        return str(json.loads(text)["volumeHandle"])

    def remove(self, path: str) -> None:
        """removeMountDir: a mount point is left; else the directory, vol_data.json and their parent go."""
        if self.is_mount_point(path):
            return
        parent = os.path.dirname(path)
        steps = ((os.rmdir, path), (os.unlink, f"{parent}/{_DATA}"), (os.rmdir, parent))
        try:
            for remove, gone in steps:
                with contextlib.suppress(FileNotFoundError):
                    remove(gone)
        except OSError as error:
            raise NotRemoved(str(error)) from error

    def has_mounts(self, pod_uid: str) -> bool:
        """Whether something is mounted on a target of the pod."""
        targets = (Path(self._root) / "pods" / pod_uid / "volumes").glob("*/*/mount")
        return any(self.is_mount_point(str(target)) for target in targets)

    def remove_pod(self, pod_uid: str) -> None:
        """What the kubelet does with the directory of a pod that has no volumes any more."""
        shutil.rmtree(f"{self._root}/pods/{pod_uid}", ignore_errors=True)

    def find_all(self) -> Iterator[Found]:
        """The volumes of all pods, by their directories."""
        pods = Path(self._root) / "pods"
        for directory in sorted(pods.glob("*/volumes/kubernetes.io~csi/*")):
            target = str(directory / "mount")
            if (handle := self.saved_handle(target)) is not None:
                yield Found(directory.parents[2].name, directory.name, handle, target)

    def _save(self, path: str, volume: Volume) -> None:
        data = {
            "specVolID": volume.name,
            "volumeHandle": volume.handle,
            "driverName": self._driver,
            "volumeLifecycleMode": "Persistent",
        }
        (Path(path).parent / _DATA).write_text(json.dumps(data), encoding="utf-8")
