"""The operations on one volume: mount, unmount, unmount device, expand. Each ends in a change of the actual state.

Every one raises when it failed, after it has put into the actual state what the kubelet concludes from the failure.
"""

import itertools

from tests.support.kubelet.csi import CapabilitiesUnknown, Code, CsiClient, OperationFailed
from tests.support.kubelet.disk import Disk
from tests.support.kubelet.state import Actual, MountedPod, Pod, State, Volume


class NoVolumeData(Exception):
    """vol_data.json is gone: the kubelet does not know which volume to unpublish."""


class VolumeOperations:
    """What the operation generator makes."""

    def __init__(self, actual: Actual, disk: Disk, csi: CsiClient) -> None:
        self._actual = actual
        self._disk = disk
        self._csi = csi
        self._tokens = itertools.count()

    async def mount(self, pod: Pod, volume: Volume, wanted_bytes: int) -> None:
        """MountDevice unless it is mounted, SetUp, and an expansion that is due."""
        actual = self._actual.attach(volume)
        if actual.device is not State.MOUNTED:
            await self._mount_device(volume)
        await self._set_up(pod, volume)
        if wanted_bytes > actual.size_bytes:
            await self._expand_at_mount(pod, volume, wanted_bytes)
        actual.pods[pod.uid] = MountedPod(pod, State.MOUNTED)

    async def unmount(self, pod: Pod, volume_name: str) -> None:
        """TearDown: whatever the error, the volume is uncertain and the operation is retried."""
        target = self._disk.target(pod.uid, volume_name)
        handle = self._disk.saved_handle(target)
        if handle is None:
            raise NoVolumeData(target)
        actual = self._actual.volumes.get(volume_name)
        try:
            await self._csi.unpublish(handle, target)
            self._disk.remove(target)
        except Exception:  # whatever the error, as the kubelet does
            if actual is not None:
                actual.pods[pod.uid] = MountedPod(pod, State.UNCERTAIN)
            raise
        if actual is not None:
            actual.pods.pop(pod.uid, None)

    async def unmount_device(self, volume: Volume) -> None:
        """UnmountDevice: when no pod has the volume and none wants it."""
        actual = self._actual.volumes[volume.name]
        staging = self._disk.staging(volume.handle)
        try:
            await self._csi.unstage(volume.handle, staging)
            self._disk.remove(staging)
        except Exception:  # whatever the error, as the kubelet does
            actual.device = State.UNCERTAIN
            raise
        actual.device = State.NOT_MOUNTED

    async def expand(self, pod: Pod, volume: Volume, wanted_bytes: int) -> None:
        """Expansion in use. FAILED_PRECONDITION: not again, until the volume left the node."""
        actual = self._actual.volumes[volume.name]
        try:
            await self._expand(pod, volume, wanted_bytes)
        except OperationFailed as error:
            actual.in_use_expansion |= error.code is Code.FAILED_PRECONDITION
            raise
        actual.size_bytes = wanted_bytes

    async def _mount_device(self, volume: Volume) -> None:
        try:
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
            await self._publish(volume, pod, token)
        except OperationFailed as error:
            state = self._actual.attach(volume).state_for(pod.uid)
            self._note_forgotten(volume, state, error)
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
        actual = self._actual.attach(volume)
        try:
            await self._expand(pod, volume, wanted_bytes)
        except OperationFailed as error:
            if error.code is Code.FAILED_PRECONDITION:
                actual.in_use_expansion = True
                return
            actual.pods[pod.uid] = MountedPod(pod, State.UNCERTAIN)
            raise
        actual.size_bytes = wanted_bytes

    async def _expand(self, pod: Pod, volume: Volume, wanted_bytes: int) -> None:
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
