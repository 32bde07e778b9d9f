"""What must be frozen for a copy of a volume to be a point-in-time one.

    not in use                    nothing
    mounted on this host          its filesystem is frozen
    mounted by a guest            its filesystem is frozen, by the guest
    a raw device, published       its writers cannot be stopped: the copy must be atomic

With a freeze everything written is in the copy. Without one an atomic copy is crash-consistent, like after a power
cut: the user of a raw device must cope with that. No kernel interface makes the writers of a loop device wait: its
queue is quiesced only within an ioctl, a read-only device fails writes instead of delaying them, and freezing the
pool's own filesystem would block the copy as well. So a raw device in use is refused where copies take time; in a
group it is checked for writes (`snapshot_sets`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from crust.blockdriver.records.stores import Stores
from crust.blockdriver.snapshots.freezer import InGuest, Member
from crust.blockdriver.snapshots.host_freeze import OnHost
from crust.core import errors, volumes
from crust.host.block import holders
from crust.host.mounts import device_mounts


@dataclass(frozen=True, slots=True)
class QuiescePlan:
    """The writers of some volumes: what to freeze, in guests first, and what can only be checked for writes."""

    members: tuple[Member, ...] = ()
    raw: tuple[volumes.VolumeId, ...] = ()


def check(stores: Stores, volume_ids: Iterable[volumes.VolumeId]) -> QuiescePlan:
    """What to freeze for a point-in-time copy of all the volumes.

    Raises `RawDeviceInUse`, `FilesystemMountCovered`, `BusyAfterLazyUnmount`. Valid while the caller has the volumes
    locked. Blocks.
    """
    found = [_check(stores, volume_id) for volume_id in volume_ids]
    members = [member for one in found for member in one.members]
    return QuiescePlan(
        members=tuple(sorted(members, key=lambda each: isinstance(each, OnHost))),
        raw=tuple(each for one in found for each in one.raw),
    )


def _check(stores: Stores, volume_id: volumes.VolumeId) -> QuiescePlan:
    live = stores.node_state.live_publishes(volume_id)
    writers = [each for each in live if not each.readonly]
    attachment = stores.access.attached(volume_id)
    device = attachment.device if attachment else None
    deferred = next((writer for writer in writers if writer.deferred), None)
    if deferred is not None:
        target = volumes.TargetPath(deferred.target)
        return QuiescePlan(members=(InGuest(volume_id, target, device.path if device else ""),))
    raw = next((writer for writer in writers if writer.kind == "block"), None)
    if raw is not None and not stores.provisioning.copies_at_once():
        raise errors.NotReady.named(
            "RawDeviceInUse",
            f"{volume_id} cannot be copied now",
            why=(
                f"it is published as a raw device at {raw.target}, and a copy that takes time "
                "would be inconsistent"
            ),
            hint=(
                "unpublish it first, or keep the pool on xfs or btrfs, where a copy takes no time"
            ),
        )
    if raw is not None:
        return QuiescePlan(raw=(volume_id,))
    here = _mounted(volume_id, device) if device else None
    if device is not None and here is None and not live:
        _check_unheld(volume_id, device.path)
    return QuiescePlan(members=(here,) if here else ())


def _check_unheld(volume_id: volumes.VolumeId, device: str) -> None:
    if holders.is_exclusively_held(device):
        raise errors.NotReady.named(
            "BusyAfterLazyUnmount",
            f"{volume_id} cannot be copied now",
            why=(
                f"it is not published, but {device} is busy: a program has it open, or it was "
                "unmounted lazily"
            ),
            hint="end the processes of its last user, then retry",
        )


def _mounted(volume_id: volumes.VolumeId, source: volumes.BlockSource) -> OnHost | None:
    found = [
        each for each in device_mounts.filesystem_mounts(source) if "ro" not in each.super_options
    ]
    if not found:
        return None
    for mount in found:
        if device_mounts.is_visible(
            mount
        ):  # a covered mount point would freeze the mount that covers it
            return OnHost(volume_id, source.identity, mount.target)
    raise errors.NotReady.named(
        "FilesystemMountCovered",
        f"{volume_id} cannot be copied now",
        why="each of its mounts is covered by another mount",
        hint="unmount the mount that covers it",
    )
