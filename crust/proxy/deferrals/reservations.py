"""Device reservations: one deferred writer per device and per volume, and no host mount at the same time.

Two kernels that mount one filesystem read-write destroy it, and no lower layer prevents this: a hypervisor opens a
mounted device without an error. So every publish is checked against the existing reservations, by the identity of the
device and not by its path, and of every device that shares bytes with it (a partition and its disk). Several readers
may share a device.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from crust import errors, volumes
from crust.handoff.record import Record
from crust.host.block.device_sets import DeviceSet


@dataclass(frozen=True, slots=True)
class Reservation:
    """The reservation of a deferred publish. `devices` is None until the driver has reported the device."""

    key: volumes.VolumeKey
    target: volumes.TargetPath
    devices: DeviceSet | None
    readonly: bool
    unreadable: str = ""
    """The directory of the entry, if its record cannot be read."""


class DeviceReserved(errors.NotReady):
    """The device is published to a runtime at another target."""

    def __init__(self, wanted: Reservation, holder: Reservation, *, deferred: bool) -> None:
        way = "published to a runtime" if deferred else "mounted on the host"
        super().__init__(
            f"volume {wanted.key} cannot be {way} at {wanted.target}",
            why=f"its device is published to a runtime at {holder.target}"
            + (" for writing" if not holder.readonly else ", and only readers may share it"),
            hint="stop the pod that uses it there; two kernels writing to one filesystem destroy it",
        )
        self.holder = holder.target


class ReservedByUnreadableEntry(errors.NotReady):
    """An entry whose record cannot be read reserves the volume or its device, or may do so."""

    def __init__(self, key: volumes.VolumeKey, entry: str, why: str) -> None:
        super().__init__(
            f"volume {key} may be in use by a runtime",
            why=f"the entry {entry} cannot be read, and it {why}",
            hint="see `crust volumes`; make sure that no sandbox has the volume, then move the entry away",
        )
        self.entry = entry


def check(wanted: Reservation, existing: Iterable[Reservation], *, deferred: bool = True) -> None:
    """Raise `DeviceReserved` if a holder at another target has the device, and one of the two writes."""
    for holder in existing:
        if holder.target == wanted.target or not _same_device(wanted, holder):
            continue
        if holder.unreadable:
            why = f"reserves its device, at {holder.target}"
            raise ReservedByUnreadableEntry(wanted.key, holder.unreadable, why)
        if not (wanted.readonly and holder.readonly):
            raise DeviceReserved(wanted, holder, deferred=deferred)


def _same_device(one: Reservation, other: Reservation) -> bool:
    if one.key == other.key:
        return True
    if one.devices is None or other.devices is None:
        return False
    return one.devices.shares_bytes_with(other.devices)


def of(record: Record, devices: DeviceSet) -> Reservation:
    """The reservation of a published record."""
    return Reservation(record.key, record.target, devices, record.readonly)
