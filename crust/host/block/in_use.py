"""Whether a block device is free for a guest: the one answer for a publish and for a reader's claim.

The kernel has one exclusive holder of a disk at a time, and its partitions count: a mount holds, and so do mkfs, md,
LVM, swap and a claim. One open with O_EXCL tests all of them, in every mount namespace. It succeeds beside a process
that has the device open plainly. That is right for a tool that only reads; `check_unwritten` searches the open files
of all processes for a process that writes, as a virtual machine without its runtime does: before a publish, before a
format, and before a driver detaches. A claim tests exclusivity alone.

It refuses a busy device, except for known users: read-only mounts, for a reader, or a process that has the claim of
an entry that the caller names. A search without a result is no reason to accept. It waits within the call for tools
that have a device for a moment (udev, smartd, multipathd, the probe of another publish).
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable

from crust.core import errors, volumes
from crust.host.block import devices, holders
from crust.host.block.device_sets import device_set
from crust.host.block.holders import Holder
from crust.host.mounts import mountinfo
from crust.host.process import arguments, open_files

_log = logging.getLogger(__name__)

_PAUSES_S = (0.0, 0.01, 0.05, 0.15)
"""Before each look at a busy device. Tools have it for a moment."""


def check_usable(
    device: volumes.BlockSource,
    *,
    readonly: bool,
    claims: Collection[str] = (),
    probe: bool = True,
) -> None:
    """Return if a guest may have the device. Blocks. Raises `DeviceMountedOnHost`, `holders.DeviceInUse`.

    `readonly`: the guest only reads, and may share the device with other readers. `claims` are the lock files of
    entries whose holders may have it: of this very entry, or of others that only read. Without `probe`, for an
    existing entry whose sandbox may open the device at this moment, it looks only for this namespace's mounts: the
    claim tests the others.
    """
    if not probe:
        _check_mounts(device, _related(device), ("self",), readonly=readonly)
        return
    for pause_s in _PAUSES_S:
        if pause_s:
            time.sleep(pause_s)
        if devices.is_free(device.path, device.identity):
            return
        numbers = _related(device)
        if _check_mounts(device, numbers, mountinfo.namespaces(), readonly=readonly):
            return
        opened = holders.of_devices(numbers)
        if opened and all(_has_claim(holder, claims) for holder in opened):
            return
        extra = {"device": device.path, "processes": ", ".join(map(str, opened))}
        _log.info("a device is busy", extra=extra)
    raise holders.device_in_use(device.path, numbers)


def check_unwritten(
    device: volumes.BlockSource,
    *,
    claims: Collection[str] = (),
    opened: holders.Openers | None = None,
) -> None:
    """Return if no process without a claim has the device open for writing. Blocks.

    `opened` is the result of a first look (`holders.openers`), if the caller has it. Raises `holders.DeviceInUse`
    with the processes. It does not see processes of other PID namespaces.
    """
    _check_none(
        device, lambda holder: holder.writes and not _has_claim(holder, claims), opened=opened
    )


def check_unopened(device: volumes.BlockSource) -> None:
    """Return if no other process has the device open in any way. Blocks.

    Raises `holders.DeviceInUse` with the processes. It does not see processes of other PID namespaces.
    """
    _check_none(device, lambda holder: holder.pid != os.getpid())


def _check_none(
    device: volumes.BlockSource,
    counts: Callable[[Holder], bool],
    opened: holders.Openers | None = None,
) -> None:
    for pause_s in _PAUSES_S:
        if pause_s:
            time.sleep(pause_s)
            opened = None
        users = tuple(filter(counts, holders.of_devices(_related(device), opened)))
        if not users:
            return
    raise holders.DeviceInUse(device.path, holders=users)


def _related(device: volumes.BlockSource) -> frozenset[tuple[int, int]]:
    """The numbers of the devices that share bytes with this one, and its own."""
    identities = device_set(device.identity).related | {device.identity}
    return frozenset(
        (identity.major, identity.minor)
        for identity in identities
        if isinstance(identity, volumes.DeviceIdentity)
    )


def _check_mounts(
    device: volumes.BlockSource,
    numbers: Collection[tuple[int, int]],
    namespaces: Iterable[str],
    *,
    readonly: bool,
) -> bool:
    """Whether these devices are mounted in one of the namespaces; raises unless guest and mounts only read."""
    places: list[str] = []
    is_readonly = readonly
    for pid in namespaces:
        for mount in mountinfo.of_devices(numbers, pid):
            named = f" as {arguments.command_of(int(pid))}[{pid}] has it" if pid != "self" else ""
            places.append(f"{mount.target}{named}")
            is_readonly = is_readonly and mount.readonly
    if places and not is_readonly:
        raise mounted_on_host(device, places)
    return bool(places)


def mounted_on_host(device: volumes.BlockSource, places: Iterable[str]) -> errors.NotReady:
    """The error about a device that the host has mounted at these places."""
    return errors.NotReady.named(
        "DeviceMountedOnHost",
        f"the device {device.path} cannot be used by a guest",
        why=f"this node has it mounted at {', '.join(sorted(set(places)))}",
        hint="unmount it there first; two kernels writing to one filesystem destroy it",
    )


def _has_claim(holder: Holder, claims: Collection[str]) -> bool:
    """Whether the process has the lock of one of these files."""
    return any(open_files.holders(path, [holder.pid]) for path in claims)
