"""The kubelet's directories: where a volume is staged and published, and the file that survives its restart.

Directories are removed by rmdir alone, as the kubelet does it: anything left in one makes the teardown fail for ever.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.kubelet.mount_points import MountPoints
from tests.support.kubelet.state import Pod, Volume

_DATA = "vol_data.json"
_LINKS = "volumeDevices/kubernetes.io~csi"


class NotRemoved(Exception):
    """A directory of a volume cannot be removed: it holds something."""


@dataclass(frozen=True)
class Found:
    """A volume of a pod that a restarted kubelet finds on disk."""

    pod_uid: str
    volume_name: str
    handle: str
    target: str
    block: bool = False


class BlockDisk:
    """Paths and files of raw block volumes. `loops`: paths that loop devices hold, which the kernel keeps.

    In volumeDevices below plugins/kubernetes.io/csi and below pods/<uid>:

        staging/<pv>             NodeStageVolume's directory
        publish/<pv>/<pod uid>   NodePublishVolume's target: the driver makes a file of it and binds the device to it
        <pv>/data/vol_data.json  what is known of the volume after a restart
        <pv>/dev/<pod uid>       the kubelet's own bind of the target; a loop device of the kubelet's holds it
        kubernetes.io~csi/<pv>   a pod's symbolic link to the target: the pod is found by it
    """

    def __init__(self, root: str, driver: str, mount_points: MountPoints) -> None:
        self._pods = Path(root) / "pods"
        self._base = f"{root}/plugins/kubernetes.io/csi/volumeDevices"
        self._driver = driver
        self._mount_points = mount_points
        self.loops: set[str] = set()
        self.lost: set[str] = set()
        """Targets that the kubelet does not know any more, by its own doing: nobody will ever unpublish them."""

    def staging(self, name: str) -> str:
        return f"{self._base}/staging/{name}"

    def target(self, pod_uid: str, name: str) -> str:
        return f"{self._base}/publish/{name}/{pod_uid}"

    def mapped(self, pod_uid: str, name: str) -> str:
        """The kubelet's bind of the target: the path of NodeGetVolumeStats."""
        return f"{self._base}/{name}/dev/{pod_uid}"

    def save(self, volume: Volume) -> None:
        """Make the staging directory and vol_data.json."""
        os.makedirs(self.staging(volume.name), 0o750, exist_ok=True)
        file = self._data(volume.name)
        file.parent.mkdir(0o750, parents=True, exist_ok=True)
        _save(file, volume, self._driver)

    def make_publish_directory(self, name: str) -> None:
        """The target's parent; the target itself is the driver's to make."""
        os.makedirs(os.path.dirname(self.target("", name)), 0o750, exist_ok=True)

    def saved_handle(self, name: str) -> str | None:
        """What vol_data.json says; None without one."""
        return _saved(self._data(name))

    def map(self, pod: Pod, name: str) -> None:
        """MapBlockVolume: bind, link, and a loop device on the bind."""
        target, mapped = self.target(pod.uid, name), self.mapped(pod.uid, name)
        os.makedirs(os.path.dirname(mapped), 0o750, exist_ok=True)
        if not self._mount_points.is_mount_point(mapped):
            Path(mapped).touch()
            self._mount_points.bind(target, mapped)
        link = self._link(pod.uid, name)
        link.parent.mkdir(0o750, parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        self.loops.add(mapped)

    def unmap(self, pod_uid: str, name: str) -> None:
        """UnmapBlockVolume: the same backwards."""
        mapped = self.mapped(pod_uid, name)
        self.loops.discard(mapped)
        self._link(pod_uid, name).unlink(missing_ok=True)
        if self._mount_points.is_mount_point(mapped):
            self._mount_points.unmount(mapped)
        Path(mapped).unlink(missing_ok=True)

    def is_mapped_by_any(self, name: str) -> bool:
        """GetDeviceBindMountRefs: whether pods refer to the volume."""
        return any(Path(f"{self._base}/{name}/dev").glob("*"))

    def remove(self, name: str) -> None:
        """cleanupOrphanDeviceFiles, when nothing of the volume is published or staged any more."""
        publish = os.path.dirname(self.target("", name))
        try:
            for directory in (publish, self.staging(name)):
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(directory)
        except OSError as error:
            raise NotRemoved(str(error)) from error
        shutil.rmtree(f"{self._base}/{name}", ignore_errors=True)

    def find_all(self) -> Iterator[tuple[str, str]]:
        """Pods and names of the volumes that have a link."""
        for link in sorted(self._pods.glob(f"*/{_LINKS}/*")):
            yield link.parents[2].name, link.name

    def targets(self) -> Iterator[str]:
        yield from (str(path) for path in Path(f"{self._base}/publish").glob("*/*"))

    def _data(self, name: str) -> Path:
        return Path(f"{self._base}/{name}/data/vol_data.json")

    def _link(self, pod_uid: str, name: str) -> Path:
        return self._pods / pod_uid / _LINKS / name


class Disk:
    """Paths below the kubelet's root."""

    def __init__(self, root: str, driver: str, mount_points: MountPoints) -> None:
        self._root = root
        self._driver = driver
        self._mount_points = mount_points
        self.block = BlockDisk(root, driver, mount_points)

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
        return _saved(Path(path).parent / _DATA)

    def remove(self, path: str) -> None:
        """removeMountDir: a mount point is left; else the directory, vol_data.json and their parent go."""
        if self._mount_points.is_mount_point(path):
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
        """Whether something is mounted on a target of the pod, or a raw volume of it is linked."""
        if any(uid == pod_uid for uid, _ in self.block.find_all()):
            return True
        targets = (Path(self._root) / "pods" / pod_uid / "volumes").glob("*/*/mount")
        return any(self._mount_points.is_mount_point(str(target)) for target in targets)

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
        for pod_uid, name in self.block.find_all():
            if (handle := self.block.saved_handle(name)) is not None:
                yield Found(pod_uid, name, handle, self.block.target(pod_uid, name), block=True)

    def _save(self, path: str, volume: Volume) -> None:
        _save(Path(path).parent / _DATA, volume, self._driver)


def _saved(file: Path) -> str | None:
    """The handle in a vol_data.json."""
    try:
        return str(json.loads(file.read_text("utf-8"))["volumeHandle"])
    except FileNotFoundError:
        return None


def _save(file: Path, volume: Volume, driver: str) -> None:
    data = {
        "specVolID": volume.name,
        "volumeHandle": volume.handle,
        "driverName": driver,
        "volumeLifecycleMode": "Persistent",
    }
    file.write_text(json.dumps(data), encoding="utf-8")
