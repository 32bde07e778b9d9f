"""The capacity of a pool. The full size of a volume is reserved when it is created.

Images are sparse, so the pool's free space alone says little: volumes that have not written all their blocks yet have
a right to them, or a database would fail at a write because another volume was created. Reserved is the sum of the
records (durable before the image is made) and of the records being written at this moment, so that two creates cannot
both take the last bytes.

    free = min(pool free - spare, (pool size - spare) x overcommit - reserved - blocks of snapshots)

A volume whose record is damaged or gone keeps its data, and a pod may write to it: its image's size is reserved. That
is asked for each time, so what an operator repairs or removes counts at once.

The spare, which the engine names, is never given, at any overcommit. A snapshot reserves nothing, because it does not
grow; all its blocks count, shared ones too, because its volume may overwrite all of them. What a copy is about to
take is set aside until it is written.

The engine is asked before any lock is taken.

The size of a new volume: never less than required, never more than the limit, rounded up.

Sizes are whole mebibytes if the limit allows, else whole 512-byte sectors, because a loop device shows only whole
sectors.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from crust.blockdriver.engines.protocol import PoolSpace, Provisioning
from crust.blockdriver.records.models import Usage
from crust.blockdriver.records.records import Index
from crust.core import errors, volumes
from crust.core.settings.driver import DEFAULT_POOL_LOW_PERCENT
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
        """Find those of the pool's `images` that have no record. After the records were read."""
        self._unrecorded = tuple(image for image in images if not self._index.has(image))

    def reserved(
        self, volume_id: str, size_bytes: int, *, present_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Reserve `size_bytes` for a volume of `present_bytes` until its record has them. Raises `OutOfCapacity`."""
        return self._held(self._pending, volume_id, size_bytes, size_bytes - present_bytes)

    def set_aside(self, what: str, size_bytes: int) -> AbstractContextManager[None]:
        """Reserve what a copy is about to allocate, until it is written or given up. Raises `OutOfCapacity`."""
        return self._held(self._aside, what, size_bytes, size_bytes)

    @contextmanager
    def _held(
        self, held: dict[str, int], key: str, size_bytes: int, wanted_bytes: int
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
            held[key] = size_bytes
        try:
            yield
        finally:
            with self._guard:
                del held[key]

    def available_bytes(self) -> int:
        """The free capacity now, rounded down to mebibytes."""
        space = self._space()
        with self._guard:
            return self._free_bytes(*space) // MIB * MIB

    def measured(self) -> Mapping[str, int]:
        """The capacity by kind, as crust's glossary has them. Blocks."""
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
        gone = [each for each in self._unrecorded if not self._index.has(each)]
        unknown = (*self._index.unreadable(), *gone)
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


def choose(wanted: volumes.CapacityRange, *, minimum: int, maximum: int) -> int:
    """The size in bytes for a new volume; raises `VolumeSizeNotPossible`."""
    limit = wanted.limit_bytes or maximum
    base = max(wanted.required_bytes or min(DEFAULT_BYTES, limit), minimum)
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


def satisfies(size_bytes: int, wanted: volumes.CapacityRange) -> bool:
    """Whether an existing volume of `size_bytes` satisfies `wanted`."""
    if size_bytes < wanted.required_bytes:
        return False
    return not wanted.limit_bytes or size_bytes <= wanted.limit_bytes
