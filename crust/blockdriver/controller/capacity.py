"""Room: what the pool can still promise. A volume's whole size is promised when it is made.

Images are sparse, so the free space of the pool says little: it is already promised to volumes that have not written
it. A new volume gets only what is not; a database does not learn at its next write that somebody else was faster.
The records are the ledger of promises (durable before the image is made), and what is being recorded at this moment
is kept beside them, so that two creates cannot both take the last room.

    room = (free + what the images occupy already) x overcommit - all promises

A snapshot is promised nothing: it does not grow. What its copy is about to take is set aside while it is made, where
copies take room at all, and is no longer free afterwards.

Free space and promises cost two numbers; what each image occupies may cost a look at some, and is asked only when the
two numbers do not settle it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from crust import errors, volumes
from crust.blockdriver.controller.volume_size import MIB
from crust.blockdriver.engines.protocol import Backend
from crust.blockdriver.node.state import State
from crust.blockdriver.records.index import Index


class OutOfCapacity(errors.Exhausted):
    """The pool has promised its room to others."""

    def __init__(self, wanted_bytes: int, room_bytes: int) -> None:
        super().__init__(
            f"no room for {wanted_bytes} bytes",
            why=f"the pool can promise {room_bytes} bytes more; the rest belongs to volumes that exist",
            hint="delete a volume, enlarge the pool, or ask for a smaller volume",
        )
        self.wanted_bytes = wanted_bytes
        self.room_bytes = room_bytes


def of(shared: State) -> "PoolCapacity":
    """The room of a driver's pool, of which there must be one only."""
    return PoolCapacity(shared.volume_records.index, shared.backend, shared.overcommit)


class PoolCapacity:
    """Grants room, one caller at a time. `overcommit` of 1.5 promises half as much again as there is."""

    def __init__(self, index: Index, backend: Backend, overcommit: float) -> None:
        self._index = index
        self._backend = backend
        self._overcommit = overcommit
        self._guard = threading.Lock()
        self._pending: dict[volumes.VolumeId, int] = {}
        self._aside: dict[str, int] = {}

    @contextmanager
    def reserved(self, volume_id: volumes.VolumeId, size_bytes: int) -> Iterator[None]:
        """Hold room for a volume of `size_bytes` until its record says so. Raises `OutOfCapacity`."""
        with self._guard:
            more = size_bytes - self._index.capacity_bytes(volume_id)
            if more > 0 and not self._surely_fits(more):
                self._check(more)
            self._pending[volume_id] = size_bytes
        try:
            yield
        finally:
            with self._guard:
                del self._pending[volume_id]

    def set_aside(self, what: str, size_bytes: int) -> None:
        """Keep others from room that is about to be written to, until `give_back`. Raises `OutOfCapacity`."""
        with self._guard:
            if size_bytes > 0 and not self._surely_fits(size_bytes):
                self._check(size_bytes)
            self._aside[what] = size_bytes

    def give_back(self, what: str) -> None:
        """It is written, or will not be."""
        with self._guard:
            self._aside.pop(what, None)

    def available_bytes(self) -> int:
        """What can be promised at this moment, in whole mebibytes, never negative."""
        with self._guard:
            return self._available_bytes() // MIB * MIB

    def _surely_fits(self, wanted_bytes: int) -> bool:
        """Without asking what is occupied: true even if nothing of what is promised has been written."""
        free = self._backend.available_bytes()
        return self._overcommit >= 1 and free - self._promised_bytes() >= wanted_bytes

    def _check(self, wanted_bytes: int) -> None:
        room_bytes = self._available_bytes()
        if wanted_bytes > room_bytes:
            raise OutOfCapacity(wanted_bytes, room_bytes)

    def _available_bytes(self) -> int:
        occupied = self._backend.occupied()
        sizes = self._index.sizes()
        ours = sum(min(size, occupied.get(each, 0)) for each, size in sizes.items())
        pool = self._backend.available_bytes() + ours
        return max(int(pool * self._overcommit) - self._promised_bytes(), 0)

    def _promised_bytes(self) -> int:
        begun = sum(
            max(size - self._index.capacity_bytes(each), 0) for each, size in self._pending.items()
        )
        return self._index.promised_bytes() + begun + sum(self._aside.values())
