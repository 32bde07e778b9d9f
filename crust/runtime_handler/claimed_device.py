"""The descriptor of a claimed device, which the hypervisor gets.

The descriptor is an exclusive hold: opened with O_EXCL it makes a mount or mkfs on the host fail, while the
hypervisor's plain open works. So only a runtime whose mounts are made by another kernel can use a claim: mount(2) is
EBUSY for the claimant too. Sandboxes may share read-only volumes, and a second O_EXCL open would fail, so those
are asked for once, as a publish asks (crust/host/block/in_use.py), and opened without it; the proxy's device
reservation does the rest.
"""

import os

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.host.block import devices, in_use


def hold(record: Record) -> int:
    """The descriptor that holds the device; -1 for an image, of which this host has no device.

    That no other host writes to an image is the matter of its claim in the cluster (specs/handoff.md).
    """
    return -1 if record.image is not None else _opened(record)


def _opened(record: Record) -> int:
    """Open the record's device, then check its identity: an open device does not change any more."""
    is_reader = record.readonly
    fd = (devices.open_shared if is_reader else devices.open_exclusive)(record.device)
    try:
        _check_identity(record, fd)
        if is_reader:  # asks once for exclusivity, and does not keep it: readers share the device
            in_use.check(record.block, readonly=True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_identity(record: Record, fd: int) -> None:
    found = devices.identify(record.device)
    number = os.fstat(fd).st_rdev
    opened = volumes.DeviceIdentity(os.major(number), os.minor(number), found.disk_sequence)
    if opened != found or found != record.identity:
        raise errors.NotReady.named(
            "DeviceChanged",
            f"the volume at {record.target} cannot be used",
            why=f"{record.device} is {opened} now, but {record.identity} was published",
            hint="the device was attached again; unpublish the volume and publish it again",
        )
