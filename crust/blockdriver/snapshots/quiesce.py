"""What has to stand still for a copy of a volume to be one of a single moment.

    not in use                    nothing
    mounted on this host          its filesystem is frozen
    mounted by a guest            its filesystem is frozen, by the guest
    a raw device, published       nothing holds its writers: a copy must take no time

Frozen, all that was written is in the copy. Without, a copy that takes no time is what a power cut leaves: that is a
raw device's user's business. No kernel interface makes the writers of a loop device wait: its queue stands still only
within an ioctl, a read-only device fails writes instead of holding them, and freezing the pool's own filesystem holds
the copy as well. So a raw device in use is refused where copies take time; in a group it is watched (`snapshotting`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from crust import errors, volumes
from crust.blockdriver.engines.protocol import Attachment, Source
from crust.blockdriver.snapshots.guest_freeze import InGuest
from crust.blockdriver.snapshots.host_freeze import Freezable
from crust.host.block import holders
from crust.host.mounts import device_mounts


class RawDeviceInUse(errors.NotReady):
    """A raw device is written to, and its writers cannot be held."""

    def __init__(self, volume_id: str, target: str) -> None:
        super().__init__(
            f"{volume_id} cannot be copied now",
            why=f"it is published as a raw device at {target}, and a copy would take time here, and be of no moment",
            hint="unpublish it first, or keep the pool on xfs or btrfs, where a copy takes no time",
        )
        self.volume_id = volume_id
        self.target = target


class NotReachable(errors.NotReady):
    """The filesystem is mounted where it cannot be frozen."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"{volume_id} cannot be copied now",
            why="every place where it is mounted is covered by another mount",
            hint="unmount what covers it",
        )
        self.volume_id = volume_id


class BusyAfterLazyUnmount(errors.NotReady):
    """Something has the device of a volume that is published nowhere: a mount that was taken off lazily lives on."""

    def __init__(self, volume_id: str, device: str) -> None:
        super().__init__(
            f"{volume_id} cannot be copied now",
            why=f"it is published nowhere, and something holds {device}: a program, or a mount that nobody sees",
            hint="end what was left of its last user, then retry",
        )
        self.volume_id = volume_id
        self.device = device


class PublishedAt(Protocol):
    """A volume at a target."""

    @property
    def target(self) -> str:
        """The target path."""
        ...

    @property
    def kind(self) -> Literal["mount", "block"]:
        """A filesystem, or a raw device."""
        ...

    @property
    def readonly(self) -> bool:
        """Whether nobody writes there."""
        ...

    @property
    def deferred(self) -> bool:
        """Whether a guest mounts it."""
        ...


class VolumeUse(Protocol):
    """How the node uses volumes at this moment; the node part answers."""

    def live_publishes(self, volume_id: volumes.VolumeId) -> Sequence[PublishedAt]:
        """Where the volume is published."""
        ...

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """How the volume is attached, if it is."""
        ...


@dataclass(frozen=True, slots=True)
class QuiescePlan:
    """What of some volumes moves: what is to be frozen, here and in guests, and what can only be watched."""

    here: tuple[Freezable, ...] = ()
    in_guests: tuple[InGuest, ...] = ()
    raw: tuple[volumes.VolumeId, ...] = ()


def check(node: VolumeUse, volume_ids: Iterable[volumes.VolumeId], *, at_once: bool) -> QuiescePlan:
    """What is to stand still while the volumes are copied, all of them at one moment.

    `at_once` is whether a copy takes no time (`Backend.copies_at_once`). Raises `RawDeviceInUse`, `NotReachable`,
    `BusyAfterLazyUnmount`. Holds as long as nobody else operates on the volumes.
    """
    found = [_check(node, each, at_once=at_once) for each in volume_ids]
    return QuiescePlan(
        here=tuple(each for one in found for each in one.here),
        in_guests=tuple(each for one in found for each in one.in_guests),
        raw=tuple(each for one in found for each in one.raw),
    )


def _check(node: VolumeUse, volume_id: volumes.VolumeId, *, at_once: bool) -> QuiescePlan:
    live = node.live_publishes(volume_id)
    writers = [each for each in live if not each.readonly]
    attachment = node.attached(volume_id)
    device = attachment.device if attachment else None
    deferred = next((each for each in writers if each.deferred), None)
    if deferred is not None:
        target = volumes.TargetPath(deferred.target)
        return QuiescePlan(in_guests=(InGuest(volume_id, target, device.path if device else ""),))
    raw = next((each for each in writers if each.kind == "block"), None)
    if raw is not None and not at_once:
        raise RawDeviceInUse(volume_id, raw.target)
    if raw is not None:
        return QuiescePlan(raw=(volume_id,))
    here = _mounted(volume_id, device) if device else None
    if device is not None and here is None and not live:
        _check_unheld(volume_id, device.path)
    return QuiescePlan(here=(here,) if here else ())


def _check_unheld(volume_id: volumes.VolumeId, device: str) -> None:
    if holders.is_exclusively_held(device):
        raise BusyAfterLazyUnmount(volume_id, device)


def _mounted(volume_id: volumes.VolumeId, source: Source) -> Freezable | None:
    found = [
        each for each in device_mounts.filesystem_mounts(source) if "ro" not in each.super_options
    ]
    if not found:
        return None
    for mount in found:
        if device_mounts.is_visible(mount):  # what covers a mountpoint would be frozen in its stead
            return Freezable(volume_id, source.identity, mount.target)
    raise NotReachable(volume_id)
