"""The capacity of a pool. The full size of a volume is reserved when it is created.

Images are sparse, so the pool's free space alone says little: a volume has a right to the blocks that it has not
written yet, or a database would fail at a write after the creation of another volume. Reserved is the sum of the
records (durable before the image) and of the records being written at this moment, so that two creates cannot both
take the last bytes.

    others = the medium's used bytes - own          what is none of the pool's volumes and snapshots
    left   = the medium's size - others - spare - blocks of snapshots - reserved for thick volumes
           = free + own - spare - blocks of snapshots - reserved for thick volumes
    a thin volume may have             min(free - spare, left x overcommit - reserved for thin volumes)
    a thick volume or a snapshot may   min(free - spare, left - reserved for thin volumes / overcommit)

So a pool can still promise what its medium has free, less what is promised and not yet used. The engine says what is
`free` and `own` now (`PoolSpace`), so a file of others counts as soon as it is there, also in a directory of a
filesystem with other uses. What others write into promised bytes, and into the spare, is `missing_bytes`: then thin
volumes are unhealthy, before a write fails. With overcommit they are so too while only a part of the spare is free.

A thick volume has all of its blocks from its creation on, so it is never overcommitted. A thin one gets a block when
it writes it.

A volume whose record is damaged or gone keeps its data, and a pod may write to it: its image's size is reserved. The
driver reads that size each time, so an operator's repair or removal counts at once.

The driver never gives the engine's spare to volumes, at any overcommit. A snapshot does not grow. Its blocks count,
also those that it shares with its volume: that may overwrite all of them, and then needs new ones. So a snapshot is
refused where less is free than it adds to them: its volume's blocks that no other snapshot has. Its blocks count from
its commit on, each block once however many snapshots have it. Before, they are set aside: at first what the volume
has, then what the copy has, because a freeze writes the filesystem's page cache into the volume. Where
`reserves_snapshots` is false, or `overcommit` is above 1 and the volume is thin, a snapshot that shares its blocks is
never refused, and a volume may get ENOSPC when it overwrites its own data.

The driver asks the engine before it takes a lock.

The size of a new volume is never less than required and never more than the limit, rounded up to whole mebibytes if
the limit allows, else to whole 512-byte sectors: a loop device shows only whole sectors.
"""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from crust.blockdriver.engines.protocol import PoolSpace, Provisioning
from crust.blockdriver.records.models import Usage
from crust.blockdriver.records.records import Index
from crust.core import errors, volumes
from crust.host.filesystems import mkfs

Kind: TypeAlias = Literal["thin", "thick", "aside"]
"""Of what is reserved: for a thin or a thick volume until it has a record, or set aside for a set of snapshots."""


@dataclass(slots=True)
class PoolCapacity:
    """Reserves a pool's capacity. With an `overcommit` of 1.5 thin volumes may reserve 150 % of the pool.

    Operators are warned when less than `low_percent` of the pool is free.
    """

    _index: Index
    _provisioning: Provisioning
    _overcommit: float
    _low_percent: int
    _reserves_snapshots: bool
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _reserved: dict[Kind, dict[str, int]] = field(
        default_factory=lambda: {"thin": {}, "thick": {}, "aside": {}}, init=False
    )
    _unrecorded: tuple[volumes.VolumeId, ...] = field(default=(), init=False)
    missing_bytes: int = field(default=0, init=False)
    """What thin volumes were promised and the medium has no longer, when its space was last looked at."""

    def open(self, images: Iterable[volumes.VolumeId]) -> None:
        """Find the pool's `images` without a record, once the records are read."""
        self._unrecorded = tuple(image for image in images if not self._index.has(image))

    @contextmanager
    def reserved(
        self,
        volume_or_set_id: str,
        size_bytes: int,
        *,
        kind: Kind,
        present_bytes: int = 0,
        cloned: volumes.VolumeId | None = None,
    ) -> Iterator[None]:
        """Reserve `size_bytes` for a volume of `present_bytes` until its record has them, and what the volume that it
        is `cloned` from loses. Raises `OutOfCapacity`.
        """
        if cloned is not None and self._is_promised(cloned):
            size_bytes += self._provisioning.cloned_bytes(cloned)
        space = self._space()
        with self._guard:
            free_bytes = self._free_bytes(space, thick=kind != "thin")
            if size_bytes - present_bytes > free_bytes:
                raise _out_of_capacity(size_bytes - present_bytes, free_bytes)
            self._reserved[kind][volume_or_set_id] = size_bytes
        try:
            yield
        finally:
            with self._guard:
                del self._reserved[kind][volume_or_set_id]

    def set_aside(
        self, set_id: str, volume_ids: Iterable[volumes.VolumeId]
    ) -> AbstractContextManager[None]:
        """Reserve the blocks of a set of snapshots until it is committed or given up. Raises `OutOfCapacity`."""
        sources = [volume_id for volume_id in volume_ids if self._is_promised(volume_id)]
        size_bytes = sum(map(self._provisioning.added_bytes, sources))
        return self.reserved(set_id, size_bytes, kind="aside")

    def check_taken(
        self, set_id: str, volume_ids: Iterable[volumes.VolumeId], added_bytes: int
    ) -> None:
        """Set aside the blocks that a set has now, before its commit; it may have more than its volumes had.

        Raises `OutOfCapacity`: the set is given up.
        """
        if not any(map(self._is_promised, volume_ids)):
            return
        space = self._space()
        has_blocks = not self._provisioning.copies_at_once()
        with self._guard:
            free_bytes = self._free_bytes(
                space, thick=True, without=set_id, taken_bytes=added_bytes if has_blocks else 0
            )
            if added_bytes > free_bytes:
                raise _out_of_capacity(added_bytes, free_bytes)
            self._reserved["aside"][set_id] = added_bytes

    def _is_promised(self, volume_id: volumes.VolumeId) -> bool:
        """Whether a snapshot of the volume needs free blocks: as a copy, or by its right to all of its own."""
        summary = self._index.get(volume_id)
        has_right = self._overcommit <= 1 or (summary is not None and summary.thick)
        return (self._reserves_snapshots and has_right) or not self._provisioning.copies_at_once()

    def available_bytes(self, *, thick: bool = False) -> int:
        """The free capacity now, for a thin volume or a thick one, rounded down to mebibytes."""
        space = self._space()
        with self._guard:
            return self._free_bytes(space, thick=thick) // MIB * MIB

    def measured(self) -> Mapping[str, int]:
        """The capacity by the kinds of crust's glossary. Blocks."""
        seen = self._space()
        size_bytes = seen.space.free_bytes + seen.space.own_bytes
        reserved = self._index.reserved_bytes
        with self._guard:
            return {
                "size": size_bytes,
                "allocated": seen.space.own_bytes,
                "reserved": reserved() + reserved(thick=True) + seen.unknown_bytes,
                "free": self._free_bytes(seen),
                "low": size_bytes * self._low_percent // 100,
            }

    def _space(self) -> "_Seen":
        with self._guard:
            aside = dict(self._reserved["aside"])
        without_record = [
            volume_id for volume_id in self._unrecorded if not self._index.has(volume_id)
        ]
        unknown = (*self._index.unreadable(), *without_record)
        unknown_bytes = sum(map(self._provisioning.image_bytes, unknown))
        return _Seen(self._provisioning.space(), unknown_bytes, aside)

    def _free_bytes(
        self, seen: "_Seen", *, thick: bool = False, without: str = "", taken_bytes: int = 0
    ) -> int:
        """The free capacity, and what thin volumes lack. A set of snapshots that it is `without` has none set aside,
        and its `taken_bytes` are blocks that were free.
        """
        space = seen.space
        left = space.free_bytes + space.own_bytes - space.spare_bytes - space.snapshot_bytes
        left -= self._index.reserved_bytes(self._reserved["thick"], thick=True)
        thin = self._index.reserved_bytes(self._reserved["thin"]) + seen.unknown_bytes
        unreserved = left - math.ceil(thin / self._overcommit)
        missing = -unreserved - space.spare_bytes - space.unseen_bytes
        if self._overcommit > 1 and thin:  # they may fail with less written than was promised
            missing = max(missing, space.spare_bytes - space.free_bytes)
        self.missing_bytes = max(missing, 0)
        if not thick:
            unreserved = int(left * self._overcommit) - thin
        # a set that was committed since the look has its blocks in no snapshot of the look
        aside_of = seen.aside | self._reserved["aside"]
        aside = sum(size for set_id, size in aside_of.items() if set_id != without)
        usable = space.free_bytes - space.spare_bytes
        return max(min(usable + taken_bytes, unreserved) - aside, 0)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The engine's answer, the size of the images whose record is damaged or gone, and what was set aside before."""

    space: PoolSpace
    unknown_bytes: int
    aside: dict[str, int]


def _out_of_capacity(wanted_bytes: int, free_bytes: int) -> errors.Exhausted:
    return errors.Exhausted.named(
        "OutOfCapacity",
        f"no capacity for {wanted_bytes} bytes",
        why=f"{free_bytes} bytes of the pool are free; the rest is reserved or allocated",
    )


MIB = 1024 * 1024
SECTOR_BYTES = 512
DEFAULT_BYTES = 1024 * MIB
"""The size for a request without one, if its limit allows."""

_RAW_MINIMUM_BYTES = MIB


def minimum_bytes(usages: Iterable[Usage]) -> int:
    """The smallest size for a volume that may have any of `usages`; a raw one needs one mebibyte."""
    fs_types = {usage.fs_type for usage in usages if usage.kind == "mount"}
    return max((mkfs.TABLE[each].minimum_bytes for each in fs_types), default=_RAW_MINIMUM_BYTES)


def choose(capacity: volumes.CapacityRange, *, minimum: int, maximum: int) -> int:
    """The size in bytes for a new volume; raises VolumeSizeNotPossible."""
    limit = capacity.limit_bytes or maximum
    base = max(capacity.required_bytes or min(DEFAULT_BYTES, limit), minimum)
    size = -(-base // MIB) * MIB
    if size > limit:
        size = -(-base // SECTOR_BYTES) * SECTOR_BYTES
    if size <= min(limit, maximum):
        return size
    why = f"{size} bytes exceed the largest possible volume, {maximum}"
    if size > limit:
        why = f"at least {size} bytes are needed and at most {limit} are allowed"
    raise errors.OutOfRange.named(
        "VolumeSizeNotPossible", "a volume of that size is not possible", why=why
    )
