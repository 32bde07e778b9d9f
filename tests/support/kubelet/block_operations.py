"""The operations on a raw block volume: map, unmap, unmap device, expand (csi_block.go, operation_generator.go).

They differ from those of a filesystem: the device is staged and published without a mount point of the kubelet's; a
pod's volume is uncertain before its unmap begins; a device is unmapped only when no pod refers to it; and
an expansion of a running pod names the target as its path and no staging path.
"""

from tests.support.kubelet.block_disk import BlockDisk
from tests.support.kubelet.csi import CapabilitiesUnknown, CsiClient, OperationFailed
from tests.support.kubelet.state import Actual, MountedPod, Pod, State, Volume


class NoBlockData(Exception):
    """vol_data.json is gone."""


class StillReferenced(Exception):
    """Pods refer to the device."""


class BlockOperations:
    """What the operation generator makes of volumes of volumeMode Block."""

    def __init__(self, actual: Actual, disk: BlockDisk, csi: CsiClient) -> None:
        self._actual = actual
        self._disk = disk
        self._csi = csi

    async def set_up_device(self, volume: Volume) -> None:
        """SetUpDevice: stage. A final error removes what a publish or a stage would have left."""
        self._disk.save(volume)
        try:
            await self._csi.stage(volume, self._disk.staging(volume.name))
        except OperationFailed as error:
            there = self._actual.attach(volume)
            is_done = error.is_final and not isinstance(error, CapabilitiesUnknown)
            if is_done and not there.pods:
                self._disk.remove(volume.name)
            raise

    async def map_pod_device(self, volume: Volume, pod: Pod, token: str) -> None:
        """MapPodDevice: publish. Then the kubelet's own bind, link and loop device."""
        self._disk.make_publish_directory(volume.name)
        staging, target = self._disk.staging(volume.name), self._disk.target(pod.uid, volume.name)
        await self._csi.publish(volume, pod, staging, target, token)
        self._disk.map(pod, volume.name)

    async def unmap(self, pod: Pod, volume_name: str) -> None:
        """UnmapVolume: uncertain from the beginning, so every error makes it come again."""
        handle = self._handle(volume_name)
        there = self._actual.volumes.get(volume_name)
        if there is not None:
            there.pods[pod.uid] = MountedPod(pod, State.UNCERTAIN)
        self._disk.unmap(pod.uid, volume_name)
        await self._csi.unpublish(handle, self._disk.target(pod.uid, volume_name))
        if there is not None:
            there.pods.pop(pod.uid, None)

    async def unmap_device(self, volume: Volume) -> None:
        """UnmapDevice: unstage, and remove the directories."""
        if self._disk.is_mapped_by_any(volume.name):
            raise StillReferenced(volume.name)
        there = self._actual.volumes[volume.name]
        there.device = State.UNCERTAIN
        await self._csi.unstage(self._handle(volume.name), self._disk.staging(volume.name))
        self._disk.remove(volume.name)
        there.device = State.NOT_MOUNTED

    async def expand(self, pod: Pod, volume: Volume, wanted_bytes: int) -> None:
        """NodeExpandVolume of a device: its path is the target, and there is no staging path."""
        await self._csi.expand(volume, "", self._disk.target(pod.uid, volume.name), wanted_bytes)

    def _handle(self, volume_name: str) -> str:
        handle = self._disk.saved_handle(volume_name)
        if handle is None:
            raise NoBlockData(volume_name)
        return handle
