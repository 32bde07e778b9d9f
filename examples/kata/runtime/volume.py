"""One volume in one sandbox: claimed, plugged, mounted; and all of it backwards.

    claim    lock the entry, fence the device               the host, by crust's SDK
    hold     QEMU gets both descriptors                      from here on the claim lives as long as the VM
    attach   hot-plug the device, and limit what the guest may do to it
    mount    in the guest, with the group that is asked for
    grow     if the device grew while nobody had it mounted

A step that fails undoes those before it, newest first, and stops undoing at the first that cannot be undone: a claim
is never given up while the guest may have the device, because a mount that timed out goes on in the guest, and the
next one to claim the volume would be a second kernel. Such a volume stays with the VM, its claim says why, and the
next use or the next daemon goes on with it. What QEMU holds is what tells who has it: every step is idempotent.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

from crust import errors, volumes
from crust.handoff.claims import State
from crust.handoff.record import Record
from examples.kata.runtime import ports
from examples.kata.vm import disks, values

_log = logging.getLogger(__name__)

# virtio-blk carries 20 bytes of serial number: so much of the entry's name is enough to tell volumes apart.
_SERIAL_CHARACTERS = 20

_DESCRIPTORS_PER_CLAIM = 2
"""As many descriptors has a claim; a QEMU that holds fewer was killed off while it got or returned them."""


@dataclass(frozen=True, slots=True)
class SandboxVolume:
    """A volume that a sandbox has. `serial` is its disk's, and its name in the guest."""

    claim: ports.Claim
    serial: str

    @property
    def record(self) -> Record:
        """What was handed over, as it was when the volume was claimed."""
        return self.claim.record

    @property
    def target(self) -> volumes.TargetPath:
        """The volume's name for the CO."""
        return self.claim.record.target


def serial_of(record: Record) -> str:
    """The disk's serial number in the guest."""
    return record.digest[:_SERIAL_CHARACTERS]


async def claim_and_mount(
    handoff: ports.Handoff, record: Record, sandbox: volumes.SandboxId, vm: ports.Vm
) -> SandboxVolume:
    """The volume, claimed for the sandbox and mounted in its guest; what was begun before is finished.

    Raises what refuses it. Then nothing is left behind, unless the guest does not give the device back.
    """
    serial = serial_of(record)
    held = (await vm.descriptors.held()).get(serial, 0)
    if held == _DESCRIPTORS_PER_CLAIM:
        return await _resume(handoff, record, sandbox, vm)
    if held:
        await _remove_disk(serial, vm)
    claim = await asyncio.to_thread(handoff.claim, record.target, sandbox)
    volume = SandboxVolume(claim, serial)
    try:
        await vm.descriptors.hold(serial, claim.fds)
        await _attach_and_mount(volume, vm)
    except BaseException as error:
        await _report(claim, error)
        await _undo(volume, vm)
        raise
    finally:
        await asyncio.to_thread(claim.hand_over)
    return volume


async def _resume(
    handoff: ports.Handoff, record: Record, sandbox: volumes.SandboxId, vm: ports.Vm
) -> SandboxVolume:
    """QEMU has the claim: finish whatever the one before was at. A failure leaves the claim where it is.

    A freeze that the one before began ends here: its caller cannot reach us before we have the volume, and what we do
    to a frozen filesystem waits for its thaw.
    """
    claim = await asyncio.to_thread(handoff.adopt, record.target, sandbox)
    volume = SandboxVolume(claim, serial_of(record))
    try:
        with contextlib.suppress(errors.NotFound):  # the one before had not come to the mount
            await vm.guest.thaw(volume.serial)
        await _attach_and_mount(volume, vm)
    except BaseException as error:
        await _report(claim, error)
        raise
    return volume


async def _attach_and_mount(volume: SandboxVolume, vm: ports.Vm) -> None:
    record = volume.record
    disk = await vm.attach(volume.serial, Path(record.device), read_only=record.readonly)
    await vm.limit(volume.serial, record.mount.io_limits)
    await _mount(volume, vm, disk)
    await asyncio.to_thread(volume.claim.report, State.MOUNTED)


async def _mount(volume: SandboxVolume, vm: ports.Vm, disk: disks.Disk) -> None:
    record = volume.record
    group = record.mount.group
    mounted = await vm.guest.mount(
        values.VolumeMount(
            volume=volume.serial,
            fstype=record.mount.fs_type,
            options=record.mount.mount_options,
            read_only=record.readonly,
            fs_group=values.FsGroup(group.gid, group.policy.value) if group else None,
        )
    )
    total_bytes = mounted.usage.total_bytes
    if not record.readonly:
        grown = await vm.guest.grow(volume.serial, disk.size_bytes)
        total_bytes = grown.usage.total_bytes
    extra = {
        "target": record.target.text,
        "vm": vm.name,
        "bytes": total_bytes,
        "grew": total_bytes > mounted.usage.total_bytes,
    }
    _log.info("mounted", extra=extra)


async def _remove_disk(serial: str, vm: ports.Vm) -> None:
    """Unmount and unplug, and only then let the claim go."""
    await vm.detach(serial)
    await vm.descriptors.release(serial)


async def _undo(volume: SandboxVolume, vm: ports.Vm) -> None:
    """The failure's own error is the one to report."""
    try:
        await _remove_disk(volume.serial, vm)
    except errors.CrustError as error:
        extra = {"target": volume.target.text, "vm": vm.name, "error": str(error)}
        _log.error("volume stays with the VM; stop the sandbox to free it", extra=extra)


async def _report(claim: ports.Claim, error: BaseException) -> None:
    """Leave the reason in claim.json, for the operator who looks why the pod does not start."""
    try:
        await asyncio.to_thread(claim.report, State.ERROR, str(error) or type(error).__name__)
    except errors.CrustError as err:
        _log.warning("claim tells no reason", extra={"error": str(err)})
