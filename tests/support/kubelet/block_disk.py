"""The kubelet's paths and files of raw block volumes, below plugins/…/volumeDevices and pods/<uid>/volumeDevices.

    staging/<pv>             NodeStageVolume's directory
    publish/<pv>/<pod uid>   NodePublishVolume's target: the driver makes a file of it and binds the device to it
    <pv>/data/vol_data.json  what is known of the volume after a restart
    <pv>/dev/<pod uid>       the kubelet's own bind of the target; a loop device of the kubelet's holds it
    pods/<pod uid>/volumeDevices/kubernetes.io~csi/<pv>   a symbolic link to the target: the pod is found by it

Directories are removed by rmdir alone: a target that the driver leaves makes the volume's teardown fail for ever.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.support.kubelet.mount_points import MountPoints
from tests.support.kubelet.state import Pod, Volume

_LINKS = "volumeDevices/kubernetes.io~csi"


class NotRemoved(Exception):
    """A directory of the volume cannot be removed: it holds something."""


class BlockDisk:
    """Paths below the kubelet's root. `loops`: paths that the kubelet's loop devices hold; the kernel keeps them."""

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
        data = {
            "specVolID": volume.name, "volumeHandle": volume.handle, "driverName": self._driver,
        }  # fmt: skip
        file = self._data(volume.name)
        file.parent.mkdir(0o750, parents=True, exist_ok=True)
        file.write_text(json.dumps(data), encoding="utf-8")

    def make_publish_directory(self, name: str) -> None:
        """The target's parent; the target itself is the driver's to make."""
        os.makedirs(os.path.dirname(self.target("", name)), 0o750, exist_ok=True)

    def saved_handle(self, name: str) -> str | None:
        """What vol_data.json says; None without one."""
        try:
            return str(json.loads(self._data(name).read_text(encoding="utf-8"))["volumeHandle"])
        except FileNotFoundError:
            return None

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
