"""The capacity of a pool. The full size of a volume is reserved when it is created.

Images are sparse, so the pool's free space alone says little: a volume has a right to the blocks that it has not
written yet, or a database would fail at a write after the creation of another volume. Reserved is the sum of the
records (durable before the image) and of the records being written at this moment, so that two creates cannot both
take the last bytes.

    free = min(pool free - spare, (pool size - spare) x overcommit - reserved - blocks of snapshots)

A volume whose record is damaged or gone keeps its data, and a pod may write to it: its image's size is reserved. The
driver reads that size each time, so an operator's repair or removal counts at once.

The driver never gives the engine's spare to volumes, at any overcommit. A snapshot reserves no bytes, because it does
not grow; all its blocks count, shared ones too, because its volume may overwrite all of them. A copy sets its bytes
aside until they are written. The driver asks the engine before it takes a lock.

The size of a new volume is never less than required and never more than the limit, rounded up to whole mebibytes if
the limit allows, else to whole 512-byte sectors: a loop device shows only whole sectors.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from crust.blockdriver.engines.protocol import PoolSpace, Provisioning
from crust.blockdriver.records.models import Usage
from crust.blockdriver.records.records import Index
from crust.blockdriver.settings import DEFAULT_POOL_LOW_PERCENT
from crust.core import errors, volumes
from crust.host.filesystems import mkfs


@dataclass(slots=True)
class PoolCapacity:
    """Reserves a pool's capacity. With an `overcommit` of 1.5 volumes may reserve 150 % of the pool.

    Operators are warned when less than `low_percent` of the pool is free.
    """

    _index: Index
    _provisioning: Provisioning
    _overcommit: float
    _low_percent: int = DEFAULT_POOL_LOW_PERCENT
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _pending: dict[str, int] = field(default_factory=dict, init=False)
    _aside: dict[str, int] = field(default_factory=dict, init=False)
    _unrecorded: tuple[volumes.VolumeId, ...] = field(default=(), init=False)

    def open(self, images: Iterable[volumes.VolumeId]) -> None:
        """Find the pool's `images` without a record, once the records are read."""
        self._unrecorded = tuple(image for image in images if not self._index.has(image))

    def reserved(
        self, volume_id: str, size_bytes: int, *, present_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Reserve `size_bytes` for a volume of `present_bytes` until its record has them. Raises `OutOfCapacity`."""
        return self._reserving(self._pending, volume_id, size_bytes, size_bytes - present_bytes)

    def set_aside(self, name: str, size_bytes: int) -> AbstractContextManager[None]:
        """Reserve the bytes of a copy until it is written or given up. Raises `OutOfCapacity`."""
        return self._reserving(self._aside, name, size_bytes, size_bytes)

    @contextmanager
    def _reserving(
        self, reservations: dict[str, int], key: str, size_bytes: int, wanted_bytes: int
    ) -> Iterator[None]:
        space = self._space()
        with self._guard:
            free_bytes = self._free_bytes(*space)
            if wanted_bytes > free_bytes:
                raise errors.Exhausted.named(
                    "OutOfCapacity",
                    f"no capacity for {wanted_bytes} bytes",
                    why=f"{free_bytes} bytes of the pool are free; the rest is reserved or allocated",
                    hint="delete a volume or a snapshot, enlarge the pool, or request a smaller volume",
                )
            reservations[key] = size_bytes
        try:
            yield
        finally:
            with self._guard:
                del reservations[key]

    def available_bytes(self) -> int:
        """The free capacity now, rounded down to mebibytes."""
        space = self._space()
        with self._guard:
            return self._free_bytes(*space) // MIB * MIB

    def measured(self) -> Mapping[str, int]:
        """The capacity by the kinds of crust's glossary. Blocks."""
        space, unknown_bytes = self._space()
        with self._guard:
            return {
                "size": space.size_bytes,
                "allocated": space.size_bytes - space.free_bytes,
                "reserved": self._index.reserved_bytes() + unknown_bytes,
                "free": self._free_bytes(space, unknown_bytes),
                "low": space.size_bytes * self._low_percent // 100,
            }

    def _space(self) -> tuple[PoolSpace, int]:
        """The engine's answer, and the size of the images whose record is damaged or gone."""
        without_record = [
            volume_id for volume_id in self._unrecorded if not self._index.has(volume_id)
        ]
        unknown = (*self._index.unreadable(), *without_record)
        return self._provisioning.space(), sum(map(self._provisioning.image_bytes, unknown))

    def _free_bytes(self, space: PoolSpace, unknown_bytes: int) -> int:
        spare, aside = space.spare_bytes, sum(self._aside.values())
        reserved = self._index.reserved_bytes(self._pending) + unknown_bytes
        unreserved = int((space.size_bytes - spare) * self._overcommit)
        unreserved -= reserved + space.snapshot_bytes
        return max(min(space.free_bytes - spare, unreserved) - aside, 0)


MIB = 1024 * 1024
SECTOR_BYTES = 512
DEFAULT_BYTES = 1024 * MIB
"""The size for a request without one, if its limit allows."""

_RAW_MINIMUM_BYTES = MIB


class VolumeSizeNotPossible(errors.OutOfRange):
    """No size satisfies both the request and the pool."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "a volume of that size is not possible",
            why=why,
            hint="change the requested size or its limit",
        )


def minimum_bytes(usages: Iterable[Usage]) -> int:
    """The smallest size for a volume that may have any of `usages`; a raw one needs one mebibyte."""
    fs_types = {usage.fs_type for usage in usages if usage.kind == "mount"}
    return max(map(mkfs.minimum_bytes, fs_types), default=_RAW_MINIMUM_BYTES)


def choose(capacity: volumes.CapacityRange, *, minimum: int, maximum: int) -> int:
    """The size in bytes for a new volume; raises `VolumeSizeNotPossible`."""
    limit = capacity.limit_bytes or maximum
    base = max(capacity.required_bytes or min(DEFAULT_BYTES, limit), minimum)
    size = -(-base // MIB) * MIB
    if size > limit:
        size = -(-base // SECTOR_BYTES) * SECTOR_BYTES
    if size > limit:
        raise VolumeSizeNotPossible(
            f"at least {size} bytes are needed and at most {limit} are allowed"
        )
    if size > maximum:
        raise VolumeSizeNotPossible(f"{size} bytes exceed the largest possible volume, {maximum}")
    return size


def satisfies(size_bytes: int, capacity: volumes.CapacityRange) -> bool:
    """Whether an existing volume of `size_bytes` satisfies the range."""
    if size_bytes < capacity.required_bytes:
        return False
    return not capacity.limit_bytes or size_bytes <= capacity.limit_bytes
