"""Answers the proxy's calls about volumes by asking the guests that have them mounted.

Implements `crust.runtime_handler.service.Handler`. The guest reports the usage; the disk's size bounds it.
"""

import asyncio

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.host.block import devices
from crust.runtime_handler.service import Handler
from examples.kata.runtime.sandbox import Sandbox
from examples.kata.runtime.sandboxes import Sandboxes
from examples.kata.runtime.volume import SandboxVolume
from examples.kata.vm import faults, values


class VolumeNotInSandbox(errors.NotReady):
    """No sandbox of this runtime has the volume."""

    def __init__(self, target: volumes.TargetPath) -> None:
        super().__init__(
            f"no sandbox has the volume at {target}",
            why="no VM of this runtime has it mounted",
            hint="start a container that uses it",
        )


class ImageNotGrown(errors.NotReady):
    """The image has not the size that the driver says."""

    def __init__(self, record: Record, size_bytes: int, wanted_bytes: int) -> None:
        super().__init__(
            f"the filesystem on {record.shown_source} cannot grow to {wanted_bytes} bytes",
            why=f"the image has {size_bytes} bytes",
            hint="expand the image first (ControllerExpandVolume of the driver)",
        )


class SandboxMountFailed(errors.NotReady):
    """A sandbox has claimed the volume and could not mount it."""

    def __init__(self, target: volumes.TargetPath, sandbox: str, reason: errors.CrustError) -> None:
        super().__init__(
            f"the volume at {target} is not mounted in sandbox {sandbox}",
            why=str(reason),
            hint="start a container that uses it, which retries the mount, or stop the sandbox",
        )


class Volumes(Handler):
    """Answers for the volumes of all sandboxes."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def stats(self, target: volumes.TargetPath) -> volumes.VolumeStats:
        """Usage as the guest reports it, never more than the disk's size; and the volume's condition."""
        sandbox, volume = self._find(target)
        usage, condition = await asyncio.gather(
            sandbox.vm.usage(volume.serial), _condition(sandbox, volume)
        )
        return volumes.VolumeStats(_usage(usage), condition)

    async def expand(self, target: volumes.TargetPath, capacity: volumes.CapacityRange) -> int:
        """Show the guest the device's size and grow the filesystem to it; returns the device's bytes."""
        sandbox, volume = self._find(target)
        if volume.record.image is None:
            size_bytes = await asyncio.to_thread(devices.size_bytes, volume.record.device)
        else:
            size_bytes = await self._sandboxes.handoff.image_size(volume.record)
            if size_bytes < capacity.required_bytes:
                raise ImageNotGrown(volume.record, size_bytes, capacity.required_bytes)
        await sandbox.vm.grow(volume.serial, size_bytes)
        return size_bytes

    async def health(self, target: volumes.TargetPath) -> volumes.VolumeCondition:
        """The condition that the guest reports for the filesystem, or why it is not mounted."""
        try:
            sandbox, volume = self._find(target)
        except SandboxMountFailed as failure:
            return volumes.VolumeCondition(abnormal=True, message=str(failure))
        return await _condition(sandbox, volume)

    async def freeze(self, target: volumes.TargetPath, thaw_after_s: int) -> None:
        """Freeze the filesystem in the guest; the agent's watchdog thaws it after `thaw_after_s` in any case."""
        sandbox, volume = self._find(target)
        await sandbox.vm.guest.freeze(volume.serial, thaw_after_s)

    async def thaw(self, target: volumes.TargetPath) -> bool:
        """Thaw the filesystem; returns whether the guest says that it was frozen until now."""
        sandbox, volume = self._find(target)
        return await sandbox.vm.guest.thaw(volume.serial)

    async def set_limits(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> None:
        """Have QEMU throttle the disk; waits for a mount that is under way, because it may set older limits."""
        for sandbox in self._sandboxes.all():
            await sandbox.wait_for_mount(target)
        sandbox, volume = self._find(target)
        await sandbox.vm.limit(volume.serial, limits)

    def _find(self, target: volumes.TargetPath) -> tuple[Sandbox, SandboxVolume]:
        for sandbox in self._sandboxes.all():
            volume = sandbox.volume_at(target)
            if volume is not None:
                return sandbox, volume
            if target in sandbox.mount_failures:
                raise SandboxMountFailed(target, sandbox.sandbox_id, sandbox.mount_failures[target])
        raise VolumeNotInSandbox(target)


def _usage(usage: values.Usage) -> tuple[volumes.VolumeUsage, ...]:
    return (
        volumes.VolumeUsage(
            volumes.UsageUnit.BYTES, usage.total_bytes, usage.used_bytes, usage.available_bytes
        ),
        volumes.VolumeUsage(
            volumes.UsageUnit.INODES, usage.total_inodes, usage.used_inodes, usage.available_inodes
        ),
    )


async def _condition(sandbox: Sandbox, volume: SandboxVolume) -> volumes.VolumeCondition:
    try:
        condition = await sandbox.vm.guest.health(volume.serial)
    except faults.GuestNotFound:
        return volumes.VolumeCondition(abnormal=True, message="it is not mounted in the guest")
    return volumes.VolumeCondition(abnormal=condition.abnormal, message=condition.message)
