"""The operations on one volume: mount, unmount, unmount device, expand. Each ends in a change of the actual state.

Every one raises when it failed, after it has put into the actual state what the kubelet concludes from the failure.
"""

import itertools

from tests.support.kubelet.csi import CapabilitiesUnknown, Code, CsiClient, OperationFailed
from tests.support.kubelet.disk import BlockDisk, Disk
from tests.support.kubelet.state import Actual, MountedPod, Pod, State, Volume


class NoVolumeData(Exception):
    """vol_data.json is gone: the kubelet does not know which volume to unpublish."""


class StillReferenced(Exception):
    """Pods refer to the device."""


class BlockOperations:
    """The operations on a raw block volume (csi_block.go, operation_generator.go).

    They differ from those of a filesystem: the device is staged and published without a mount point of the kubelet's;
    a pod's volume is uncertain before its unmap begins; a device is unmapped only when no pod refers to it; and an
    expansion of a running pod names the target as its path and no staging path.
    """

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
            raise NoVolumeData(volume_name)
        return handle


class VolumeOperations:
    """What the operation generator makes."""

    def __init__(self, actual: Actual, disk: Disk, csi: CsiClient) -> None:
        self._actual = actual
        self._disk = disk
        self._csi = csi
        self._block = BlockOperations(actual, disk.block, csi)
        self._tokens = itertools.count()

    async def mount(self, pod: Pod, volume: Volume, wanted_bytes: int) -> None:
        """MountDevice unless it is mounted, SetUp, and an expansion that is due."""
        there = self._actual.attach(volume)
        if there.device is not State.MOUNTED:
            await self._mount_device(volume)
        await self._set_up(pod, volume)
        if wanted_bytes > there.size_bytes:
            await self._expand_at_mount(pod, volume, wanted_bytes)
        there.pods[pod.uid] = MountedPod(pod, State.MOUNTED)

    async def unmount(self, pod: Pod, volume_name: str) -> None:
        """TearDown: whatever the error, the volume is uncertain and the operation is retried."""
        known = self._actual.volumes.get(volume_name)
        if known is not None and known.volume.block:
            return await self._block.unmap(pod, volume_name)
        target = self._disk.target(pod.uid, volume_name)
        handle = self._disk.saved_handle(target)
        if handle is None:
            raise NoVolumeData(target)
        there = self._actual.volumes.get(volume_name)
        try:
            await self._csi.unpublish(handle, target)
            self._disk.remove(target)
        except Exception:  # whatever the error, as the kubelet does
            if there is not None:
                there.pods[pod.uid] = MountedPod(pod, State.UNCERTAIN)
            raise
        if there is not None:
            there.pods.pop(pod.uid, None)

    async def unmount_device(self, volume: Volume) -> None:
        """UnmountDevice: when no pod has the volume and none wants it."""
        if volume.block:
            return await self._block.unmap_device(volume)
        there = self._actual.volumes[volume.name]
        staging = self._disk.staging(volume.handle)
        try:
            await self._csi.unstage(volume.handle, staging)
            self._disk.remove(staging)
        except Exception:  # whatever the error, as the kubelet does
            there.device = State.UNCERTAIN
            raise
        there.device = State.NOT_MOUNTED

    async def expand(self, pod: Pod, volume: Volume, wanted_bytes: int) -> None:
        """Expansion in use. FAILED_PRECONDITION: not again, until the volume left the node."""
        there = self._actual.volumes[volume.name]
        try:
            await self._expand(pod, volume, wanted_bytes)
        except OperationFailed as error:
            there.in_use_expansion |= error.code is Code.FAILED_PRECONDITION
            raise
        there.size_bytes = wanted_bytes

    async def _mount_device(self, volume: Volume) -> None:
        try:
            if volume.block:
                await self._block.set_up_device(volume)
            else:
                await self._stage(volume)
        except OperationFailed as error:
            self._note_forgotten(volume, self._actual.attach(volume).device, error)
            self._actual.device_failed(volume, is_final=error.is_final)
            raise
        self._actual.attach(volume).device = State.MOUNTED

    async def _stage(self, volume: Volume) -> None:
        staging = self._disk.staging(volume.handle)
        self._disk.save_staging(volume)
        try:
            await self._csi.stage(volume, staging)
        except OperationFailed as error:
            if error.is_final and not isinstance(error, CapabilitiesUnknown):
                self._disk.remove(staging)
            raise

    async def _set_up(self, pod: Pod, volume: Volume) -> None:
        token = f"token-{next(self._tokens)}"
        try:
            if volume.block:
                await self._block.map_pod_device(volume, pod, token)
            else:
                await self._publish(volume, pod, token)
        except OperationFailed as error:
            state = self._actual.attach(volume).state_for(pod.uid)
            self._note_forgotten(volume, state, error)
            is_unknown = isinstance(error, CapabilitiesUnknown) and state is State.UNCERTAIN
            if volume.block and is_unknown:
                self._disk.block.lost.add(self._disk.block.target(pod.uid, volume.name))
            self._actual.mount_failed(volume, pod, is_final=error.is_final)
            raise

    async def _publish(self, volume: Volume, pod: Pod, token: str) -> None:
        target = self._disk.target(pod.uid, volume.name)
        self._disk.save_target(pod, volume)
        staging = self._disk.staging(volume.handle)
        try:
            await self._csi.publish(volume, pod, staging, target, token)
        except OperationFailed as error:
            if error.is_final and not isinstance(error, CapabilitiesUnknown):
                self._disk.remove(target)
                self._note_stuck(pod, volume, target)
            raise

    async def _expand_at_mount(self, pod: Pod, volume: Volume, wanted_bytes: int) -> None:
        there = self._actual.attach(volume)
        try:
            await self._expand(pod, volume, wanted_bytes)
        except OperationFailed as error:
            if error.code is Code.FAILED_PRECONDITION:
                there.in_use_expansion = True
                return
            there.pods[pod.uid] = MountedPod(pod, State.UNCERTAIN)
            raise
        there.size_bytes = wanted_bytes

    async def _expand(self, pod: Pod, volume: Volume, wanted_bytes: int) -> None:
        if volume.block:
            return await self._block.expand(pod, volume, wanted_bytes)
        staging = self._disk.staging(volume.handle)
        target = self._disk.target(pod.uid, volume.name)
        await self._csi.expand(volume, staging, target, wanted_bytes)

    def _note_stuck(self, pod: Pod, volume: Volume, target: str) -> None:
        """A reconstructed volume stays uncertain after a final error, but its vol_data.json is gone: it can never be
        unmounted ("failed to load volume data file") until the kubelet is restarted, which does not find it then.
        """
        mounted = self._actual.attach(volume).pods.get(pod.uid)
        is_reconstructed = mounted is not None and mounted.reconstructed
        if is_reconstructed and self._disk.saved_handle(target) is None:
            self._actual.forgotten.append(volume.name)

    def _note_forgotten(self, volume: Volume, state: State, error: OperationFailed) -> None:
        reconstructed = any(pod.reconstructed for pod in self._actual.attach(volume).pods.values())
        if reconstructed:
            return
        if isinstance(error, CapabilitiesUnknown) and state is State.UNCERTAIN:
            self._actual.forgotten.append(volume.name)
