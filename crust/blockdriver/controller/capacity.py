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

GetCapacity: the free capacity for volumes of a kind, and the largest and smallest size of one.

For capabilities or a topology that this driver cannot serve the answer is 0, not an error. An unknown parameter is an
error, as at CreateVolume.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.controller import class_parameters, topology
from crust.blockdriver.engines.protocol import PoolSpace, Provisioning
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.records import Index
from crust.core import errors, volumes
from crust.core.settings.driver import DEFAULT_POOL_LOW_PERCENT
from crust.host.filesystems import mkfs


@dataclass(frozen=True, slots=True)
class _Space:
    """What the engine said, and the size of the images whose record is damaged or gone."""

    pool: PoolSpace
    without_record_bytes: int


class PoolCapacity:
    """Reserves a pool's capacity. With an `overcommit` of 1.5 volumes may reserve 150 % of the pool.

    Operators are warned when less than `low_percent` of the pool is free.
    """

    def __init__(
        self,
        index: Index,
        provisioning: Provisioning,
        overcommit: float,
        low_percent: int = DEFAULT_POOL_LOW_PERCENT,
    ) -> None:
        self._index = index
        self._provisioning = provisioning
        self._overcommit = overcommit
        self._low_percent = low_percent
        self._guard = threading.Lock()
        self._pending: dict[volumes.VolumeId, int] = {}
        self._aside: dict[str, int] = {}
        self._unrecorded: tuple[volumes.VolumeId, ...] = ()

    def open(self, images: Iterable[volumes.VolumeId]) -> None:
        """Find those of the pool's `images` that have no record. After the records were read."""
        self._unrecorded = tuple(each for each in images if not self._index.has(each))

    @contextmanager
    def reserved(self, volume_id: volumes.VolumeId, size_bytes: int) -> Iterator[None]:
        """Reserve `size_bytes` for a volume until its record has it. Raises `OutOfCapacity`."""
        space = self._space()
        with self._guard:
            self._check(space, size_bytes - self._index.capacity_bytes(volume_id))
            self._pending[volume_id] = size_bytes
        try:
            yield
        finally:
            with self._guard:
                del self._pending[volume_id]

    @contextmanager
    def set_aside(self, what: str, size_bytes: int) -> Iterator[None]:
        """Reserve what a copy is about to allocate, until it is written or given up. Raises `OutOfCapacity`."""
        space = self._space()
        with self._guard:
            self._check(space, size_bytes)
            self._aside[what] = size_bytes
        try:
            yield
        finally:
            with self._guard:
                del self._aside[what]

    def available_bytes(self) -> int:
        """The free capacity now, rounded down to mebibytes."""
        space = self._space()
        with self._guard:
            return self._free_bytes(space) // MIB * MIB

    def measured(self) -> Mapping[str, int]:
        """The capacity by kind, as crust's glossary has them. Blocks."""
        space = self._space()
        with self._guard:
            return {
                "size": space.pool.size_bytes,
                "allocated": space.pool.size_bytes - space.pool.free_bytes,
                "reserved": self._index.reserved_bytes() + space.without_record_bytes,
                "free": self._free_bytes(space),
                "low": space.pool.size_bytes * self._low_percent // 100,
            }

    def _space(self) -> _Space:
        gone = [each for each in self._unrecorded if not self._index.has(each)]
        unknown = (*self._index.unreadable(), *gone)
        return _Space(self._provisioning.space(), sum(map(self._provisioning.image_bytes, unknown)))

    def _check(self, space: _Space, wanted_bytes: int) -> None:
        free_bytes = self._free_bytes(space)
        if wanted_bytes > free_bytes:
            raise errors.Exhausted.named(
                "OutOfCapacity",
                f"no capacity for {wanted_bytes} bytes",
                why=f"{free_bytes} bytes of the pool are free; the rest is reserved or allocated",
                hint="delete a volume or a snapshot, enlarge the pool, or request a smaller volume",
            )

    def _free_bytes(self, asked: _Space) -> int:
        space = asked.pool
        spare, aside = space.spare_bytes, sum(self._aside.values())
        begun = sum(
            max(size - self._index.capacity_bytes(each), 0) for each, size in self._pending.items()
        )
        reserved = self._index.reserved_bytes() + asked.without_record_bytes
        taken = reserved + begun + space.snapshot_bytes
        unreserved = int((space.size_bytes - spare) * self._overcommit) - taken
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


def minimum_bytes(fs_types: Iterable[str]) -> int:
    """The smallest size for a volume that may carry any of `fs_types`; a raw one needs one mebibyte."""
    return max((mkfs.minimum_bytes(each) for each in fs_types), default=_RAW_MINIMUM_BYTES)


def choose(wanted: volumes.CapacityRange, *, minimum: int, maximum: int) -> int:
    """The size in bytes for a new volume; raises `VolumeSizeNotPossible`."""
    limit = wanted.limit_bytes or maximum
    base = max(wanted.required_bytes or min(DEFAULT_BYTES, limit), minimum)
    size = _round_up(base, MIB)
    if size > limit:
        size = _round_up(base, SECTOR_BYTES)
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


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class CapacityQuery:
    """A decoded GetCapacityRequest; `place` is empty for any topology."""

    capabilities: tuple[volumes.VolumeCapability, ...]
    parameters: tuple[tuple[str, str], ...]
    place: topology.Segments


@dataclass(frozen=True, slots=True)
class AvailableCapacity:
    """Free bytes, and the limits for the size of one volume."""

    available_bytes: int
    maximum_bytes: int
    minimum_bytes: int


class CapacityReport:
    """Answers from the same numbers that decide about new volumes."""

    def __init__(
        self,
        pool_capacity: PoolCapacity,
        provisioning: Provisioning,
        supported: SupportedCapabilities,
        segment: str,
    ) -> None:
        """`segment` is the value of this node's topology segment."""
        self._capacity = pool_capacity
        self._provisioning = provisioning
        self._supported = supported
        self._segment = segment

    def available(self, query: CapacityQuery) -> AvailableCapacity:
        """The available capacity. Raises `class_parameters.UnknownParameter`, `InvalidParameter`. Blocks."""
        read = class_parameters.parse(dict(query.parameters), self._supported.fs_types)
        if not self._can_be_made(query):
            return AvailableCapacity(0, 0, 0)
        usages = capability_check.usages_of(query.capabilities, read.fs_type)
        minimum = minimum_bytes({each.fs_type for each in usages if each.kind == "mount"})
        available = self._capacity.available_bytes()
        return AvailableCapacity(
            available, min(available, self._provisioning.maximum_bytes()), minimum
        )

    def _can_be_made(self, query: CapacityQuery) -> bool:
        if query.place and not topology.is_here(query.place, self._segment):
            return False
        return not any(self._supported.obstacle(each) for each in query.capabilities)
