"""What the pool can still give. A volume's whole size is reserved when it is made.

Images are sparse, so the free space of the pool says little: volumes that have not written it yet have a right to
it. A database does not learn at its next write that somebody else was faster. What is reserved is the sum of the
records (durable before the image is made), and of what is being recorded at this moment, so that two creates cannot
both take the last of it.

    free = min(pool free - spare, (pool size - spare) x overcommit - reserved - blocks of snapshots)

The spare is given to nobody, at any overcommit: records, the extent maps of the images, and the pool's own
bookkeeping grow with what is written. A snapshot reserves nothing, because it does not grow; all its blocks count,
shared ones too, because its volume may write all of them anew. What a copy is about to take is set aside meanwhile.

The pool is asked two numbers, before any lock is taken.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from crust import errors, volumes
from crust.blockdriver.controller.volume_size import MIB
from crust.blockdriver.engines.protocol import Backend, PoolSpace
from crust.blockdriver.records.index import Index

_LEAST_SPARE_BYTES = 64 * MIB


class OutOfCapacity(errors.Exhausted):
    """The pool has nothing left to give of this size."""

    def __init__(self, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"no room for {wanted_bytes} bytes",
            why=f"the pool can give {free_bytes} bytes more; the rest is reserved or taken",
            hint="delete a volume or a snapshot, enlarge the pool, or ask for a smaller volume",
        )
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes


def spare_bytes(space: PoolSpace) -> int:
    """What is never given: 1 % of the pool, and 64 MiB at least."""
    return max(space.size_bytes // 100, _LEAST_SPARE_BYTES)


class PoolCapacity:
    """Gives a pool's capacity, one caller at a time. `overcommit` of 1.5 reserves half as much again as there is."""

    def __init__(self, index: Index, backend: Backend, overcommit: float) -> None:
        self._index = index
        self._backend = backend
        self._overcommit = overcommit
        self._guard = threading.Lock()
        self._pending: dict[volumes.VolumeId, int] = {}
        self._aside: dict[str, int] = {}

    @contextmanager
    def reserved(self, volume_id: volumes.VolumeId, size_bytes: int) -> Iterator[None]:
        """Reserve `size_bytes` for a volume until its record says so. Raises `OutOfCapacity`."""
        space = self._backend.space()
        with self._guard:
            self._check(space, size_bytes - self._index.capacity_bytes(volume_id))
            self._pending[volume_id] = size_bytes
        try:
            yield
        finally:
            with self._guard:
                del self._pending[volume_id]

    def set_aside(self, what: str, size_bytes: int) -> None:
        """Keep others from what is about to be written to, until `give_back`. Raises `OutOfCapacity`."""
        space = self._backend.space()
        with self._guard:
            self._check(space, size_bytes)
            self._aside[what] = size_bytes

    def give_back(self, what: str) -> None:
        """It is written, or will not be."""
        with self._guard:
            self._aside.pop(what, None)

    def available_bytes(self) -> int:
        """What can be given at this moment, in whole mebibytes, never negative."""
        space = self._backend.space()
        with self._guard:
            return self._free_bytes(space) // MIB * MIB

    def _check(self, space: PoolSpace, wanted_bytes: int) -> None:
        free_bytes = self._free_bytes(space)
        if wanted_bytes > free_bytes:
            raise OutOfCapacity(wanted_bytes, free_bytes)

    def _free_bytes(self, space: PoolSpace) -> int:
        spare, aside = spare_bytes(space), sum(self._aside.values())
        begun = sum(
            max(size - self._index.capacity_bytes(each), 0) for each, size in self._pending.items()
        )
        taken = self._index.reserved_bytes() + begun + space.snapshot_bytes
        unreserved = int((space.size_bytes - spare) * self._overcommit) - taken
        return max(min(space.free_bytes - spare, unreserved) - aside, 0)
