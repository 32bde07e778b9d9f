"""One deferred writer per device and per volume, and no host mount beside it.

Two kernels that mount one filesystem read-write destroy it, and nothing below us prevents it: a hypervisor opens a
mounted device without a complaint. So every publish is held against what is deferred already, by what the
device is and not by its path. Readers may share among themselves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from crust import errors, volumes
from crust.handoff.record import Record


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a deferred publish holds. `identity` is None before the driver has told the device."""

    key: volumes.VolumeKey
    target: volumes.TargetPath
    identity: volumes.DeviceIdentity | None
    readonly: bool


class DeviceReserved(errors.NotReady):
    """Somebody else has the device."""

    def __init__(self, wanted: Reservation, holder: Reservation, *, deferred: bool) -> None:
        way = "handed to a runtime" if deferred else "mounted on the host"
        super().__init__(
            f"volume {wanted.key} cannot be {way} at {wanted.target}",
            why=f"its device is handed to a runtime at {holder.target}"
            + (" for writing" if not holder.readonly else ", and only readers may share it"),
            hint="stop the pod that uses it there; two kernels writing to one filesystem destroy it",
        )
        self.holder = holder.target


def check(wanted: Reservation, held: Iterable[Reservation], *, deferred: bool = True) -> None:
    """Raise `DeviceReserved` if a holder at another target has the device, and one of the two writes."""
    for holder in held:
        if holder.target == wanted.target or not _same_device(wanted, holder):
            continue
        if not (wanted.readonly and holder.readonly):
            raise DeviceReserved(wanted, holder, deferred=deferred)


def _same_device(one: Reservation, other: Reservation) -> bool:
    if one.key == other.key:
        return True
    return one.identity is not None and one.identity == other.identity


def of(record: Record) -> Reservation:
    """The lease that a published record is."""
    return Reservation(record.key, record.target, record.identity, record.readonly)
