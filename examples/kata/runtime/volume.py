"""One volume in one sandbox: claimed, plugged, mounted; and the same steps undone.

    claim    lock the entry, open the device exclusively     on the host, by crust's SDK
    hold     give both descriptors to QEMU, or its keeper    from here on the claim lives as long as the VM
    attach   hot-plug the device, or the image that QEMU opens itself (`ceph_images`), and set its I/O limits
    mount    in the guest, which formats a blank volume first if it was created empty, and opens an encrypted one
             with the passphrase that the proxy gives for a claimed volume
    own      give its files to the requested fsGroup, for as long as that makes progress
    grow     the filesystem, if the device grew while it was not mounted

If a step fails, the steps before it are undone, newest first, up to the first that cannot be undone. A claim is never
released while the guest may still have the device: a mount that timed out continues in the guest, and the next
sandbox to claim the volume would be a second kernel writing to it. Such a volume stays with the VM, its claim.json
says why, and the next container or the next daemon resumes. The descriptors of QEMU or its keeper decide which VM has
the volume. Every step is idempotent.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from crust.core import deferral_keys, errors, traces, volumes
from crust.handoff.record import Record
from crust.runtime_handler.blocking import publish_context
from examples.kata.runtime import ports
from examples.kata.runtime.taken_images import Taken
from examples.kata.vm import block_nodes, faults, values

_log = logging.getLogger(__name__)

# virtio-blk carries 20 bytes of serial number; that much of the entry's name is unique.
_SERIAL_CHARACTERS = 20


def _descriptors_of(record: Record) -> int:
    """The claim lock and, unless it is an image, the device.

    Fewer are held if the daemon died while it gave or released them.
    """
    return 2 if record.image is None else 1


@dataclass(frozen=True, slots=True)
class SandboxVolume:
    """A volume of a sandbox. `serial` is its disk's serial number, and its name in the guest."""

    claim: ports.Claim
    serial: str

    @property
    def record(self) -> Record:
        """The handoff record, as it was when the volume was claimed."""
        return self.claim.record

    @property
    def target(self) -> volumes.TargetPath:
        """The volume's target path."""
        return self.claim.record.target


def serial_of(record: Record) -> str:
    """The disk's serial number in the guest."""
    return record.digest[:_SERIAL_CHARACTERS]


class ClaimsInHand:
    """The claims whose descriptors this process has at the moment, by serial.

    When keeper and standby have both ended, only these descriptors still hold such a claim. So nobody closes
    them while `lock` is held.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._claims: dict[str, ports.Claim] = {}

    def now(self) -> Mapping[str, ports.Claim]:
        """Those of this moment."""
        return dict(self._claims)

    @contextlib.asynccontextmanager
    async def having(self, serial: str, claim: ports.Claim, vm: ports.Vm) -> AsyncIterator[None]:
        """Have a claim while the block runs, then hand it over to what holds the descriptors of the VM's claims.

        After a failure only this process's copies are closed.
        """
        self._claims[serial] = claim
        try:
            yield
            await asyncio.to_thread(claim.hand_over, await vm.descriptors.holder())
        finally:
            async with self.lock:
                del self._claims[serial]
                await asyncio.to_thread(claim.close)


async def claim_and_mount(
    handoff: ports.Handoff,
    record: Record,
    sandbox: volumes.SandboxId,
    vm: ports.Vm,
    in_hand: ClaimsInHand,
) -> SandboxVolume:
    """Claim the volume for the sandbox and mount it in the guest; resumes an interrupted attempt.

    Raises the error of the step that failed; then the steps are undone as far as the guest returns the device. The
    log lines, here and on the guest's console, have the request id of the publish.
    """
    with publish_context(record, "SandboxMount"):
        return await _claim_and_mount(handoff, record, sandbox, vm, in_hand)


async def _claim_and_mount(
    handoff: ports.Handoff,
    record: Record,
    sandbox: volumes.SandboxId,
    vm: ports.Vm,
    in_hand: ClaimsInHand,
) -> SandboxVolume:
    serial = serial_of(record)
    held = (await vm.descriptors.held()).get(serial, 0)
    if held == _descriptors_of(record):
        return await _resume(handoff, record, sandbox, vm, in_hand)
    if held:
        await _detach(record, vm, handoff)
        await vm.descriptors.release(serial)
    claim = await asyncio.to_thread(handoff.claim, record.target, sandbox, vm.named_process)
    volume = SandboxVolume(claim, serial)
    async with in_hand.having(serial, claim, vm):
        try:
            await vm.descriptors.hold(serial, claim.fds)
            await _attach_and_mount(volume, vm, handoff)
        except BaseException as error:
            await _report(claim, error)
            await _undo(volume, vm, handoff, error)
            raise
    return volume


async def _resume(
    handoff: ports.Handoff,
    record: Record,
    sandbox: volumes.SandboxId,
    vm: ports.Vm,
    in_hand: ClaimsInHand,
) -> SandboxVolume:
    """Finish an earlier attempt whose claim QEMU or its keeper holds. A failure leaves the claim there.

    This ends a freeze that an earlier daemon began: its caller cannot reach this daemon before the volume is adopted,
    and the steps here would wait for the thaw of a frozen filesystem.
    """
    holder = await vm.descriptors.holder()
    claim = await asyncio.to_thread(handoff.adopt, record.target, sandbox, holder)
    volume = SandboxVolume(claim, serial_of(record))
    async with in_hand.having(volume.serial, claim, vm):
        try:
            with contextlib.suppress(errors.NotFound):  # the earlier attempt had not mounted it
                await vm.guest.thaw(volume.serial)
            await _attach_and_mount(volume, vm, handoff)
        except BaseException as error:
            await _report(claim, error)
            raise
    return volume


async def _attach_and_mount(volume: SandboxVolume, vm: ports.Vm, handoff: ports.Handoff) -> None:
    record = volume.record
    disk = await _attach(volume, vm, handoff)
    await vm.limit(volume.serial, record.mount.io_limits)
    with traces.span("GuestMount"):
        await _mount(volume, vm, handoff)
    if not record.readonly:  # its device may have grown while nobody had it mounted (H-48)
        await vm.guest.grow(volume.serial, disk.size_bytes)
    await asyncio.to_thread(volume.claim.report_mounted)
    _log.info("mounted", extra={"target": record.target.text, "vm": vm.name})


async def _attach(volume: SandboxVolume, vm: ports.Vm, handoff: ports.Handoff) -> block_nodes.Disk:
    record, serial = volume.record, volume.serial
    if record.image is None:
        return await vm.attach(serial, Path(record.device), read_only=record.readonly)
    if serial in await vm.plugged():  # an earlier daemon's: it is open, so it needs no key
        return await vm.attach_image(serial, record.image, "", _recorded, read_only=record.readonly)
    async with handoff.taking(record, vm.identity.uuid, volume.claim.sandbox_id) as taken:
        return await vm.attach_image(
            serial, record.image, taken.key, taken.record, read_only=record.readonly
        )


async def _recorded() -> None:
    """The client that has opened the image is recorded already."""


async def _give_back(volume: SandboxVolume, vm: ports.Vm, handoff: ports.Handoff) -> None:
    """End the claim on an image in its cluster, when the VM has closed it; an error is only logged.

    A claim that stays is ended with the VM, or later by `give_back_of_ended`.
    """
    record = volume.record
    if record.image is None:
        return
    try:
        await handoff.give_back(record, vm.identity.uuid, volume.claim.sandbox_id)
    except errors.CrustError as error:
        extra = {"target": record.target.text, "vm": vm.name, "error": error}
        _log.warning("the image's claim stays in its cluster", extra=extra)


async def give_back_of_ended(handoff: ports.Handoff, has_ended: Callable[[Taken], bool]) -> None:
    """End the claims on images of virtual machines that have ended for certain; an error is only logged.

    A claim that stays is tried again by the daemon, also by the next one, is taken over by this host, or is ended by
    an operator with `crust ceph fence`.
    """
    left = await asyncio.to_thread(handoff.taken)
    await asyncio.gather(
        *(_give_back_of_ended(handoff, taken) for taken in left if has_ended(taken))
    )


async def _give_back_of_ended(handoff: ports.Handoff, taken: Taken) -> None:
    try:
        await handoff.give_back_of_ended(taken)
    except errors.CrustError as error:
        extra = {"target": taken.target.text, "sandbox": taken.sandbox, "error": error}
        _log.warning("the image's claim stays in its cluster", extra=extra)


async def _mount(volume: SandboxVolume, vm: ports.Vm, handoff: ports.Handoff) -> None:
    record = volume.record
    group = record.mount.group
    wanted = values.VolumeMount(
        volume=volume.serial,
        fstype=record.mount.fs_type,
        options=record.mount.mount_options,
        read_only=record.readonly,
        format=record.mount.format,
        encrypted=record.mount.encryption is not None,
    )
    try:
        await vm.guest.mount(wanted)
    except faults.GuestNeedsPassphrase:
        # Asked for only now: a volume that is open needs none, whether or not the proxy still knows it.
        secrets = await handoff.secrets(record.target)
        await vm.guest.mount(replace(wanted, passphrase=secrets[deferral_keys.PASSPHRASE]))
    if group is not None and not record.readonly:
        await vm.guest.own(volume.serial, values.FsGroup(group.gid, group.policy.value))


async def _detach(record: Record, vm: ports.Vm, handoff: ports.Handoff) -> None:
    """Unmount and unplug.

    An image only if its cluster answers: QEMU closes it in the loop that also serves the other disks.
    """
    serial = serial_of(record)
    if record.image is not None and await vm.has_open(serial):
        try:
            await handoff.image_size(record)
        except errors.PeerUnavailable:
            raise
        except errors.CrustError as error:  # it answers that
            _log.warning(
                "closed nevertheless", extra={"target": record.target.text, "error": error}
            )
    await vm.detach(serial)


async def _undo(
    volume: SandboxVolume, vm: ports.Vm, handoff: ports.Handoff, reason: BaseException
) -> None:
    """Undo the steps, so that another sandbox may have the volume while this one's VM runs on.

    An error here is only logged, because the caller raises the first one.
    """
    try:
        await _detach(volume.record, vm, handoff)
        await _give_back(volume, vm, handoff)
        await vm.descriptors.release(volume.serial)
        await asyncio.to_thread(volume.claim.release, error=_shown(reason))
    except errors.CrustError as error:
        extra = {"target": volume.target.text, "vm": vm.name, "error": error}
        _log.error("volume stays with the VM; stop the sandbox to release it", extra=extra)


async def _report(claim: ports.Claim, error: BaseException) -> None:
    """Write the reason into claim.json, where an operator finds why the pod does not start."""
    try:
        await asyncio.to_thread(claim.report_error, _shown(error))
    except errors.CrustError as err:
        _log.warning("reason not written to the claim", extra={"error": err})


def _shown(error: BaseException) -> str:
    return (
        error.shown()
        if isinstance(error, errors.CrustError)
        else str(error) or type(error).__name__
    )
