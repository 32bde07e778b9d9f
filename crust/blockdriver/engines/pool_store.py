"""A pool as an engine keeps it: its identity (`PoolHome`), and the records of what is in it (`RecordStore`).

The records lie with the images: a disk that is moved takes both along, and a cluster has both. A record is bytes
under an id; what it says is above this (`crust.blockdriver.records`). A writer names what it has read, so no write
undoes another's, in whatever process that was.

A record comes with what it describes and goes with it (`Provisioning.making`, `taking`, `remove`); here it is read
and replaced.
"""

import enum
from typing import Protocol

from crust.blockdriver.engines.pool_ids import PoolIds
from crust.core import errors


class PoolAbsent(errors.PeerUnavailable):
    """The pool that this driver serves is not where its engine looks for it."""

    def __init__(self, what: str, *, why: str, hint: str) -> None:
        super().__init__(what, why=why, hint=hint)


class RecordChanged(errors.OperationPending):
    """A record was written by somebody else since it was read."""

    def __init__(self, shown: str) -> None:
        super().__init__(
            f"{shown} is not written",
            why="it has changed since it was read",
            hint="retry: the call then reads the present record",
        )


class PoolHome(Protocol):
    """Where a pool is, and the right to change it. A pool's id is made once, with the pool."""

    @property
    def ids(self) -> PoolIds:
        """The pool's ids, once it was opened."""
        ...

    @property
    def shown(self) -> str:
        """Where it is, for people."""
        ...

    def find(self) -> None:
        """Look whether the right pool is there, or may be made there; changes nothing. Raises `PoolAbsent`."""
        ...

    def lock(self) -> None:
        """Take what only one process may have of the pool, until `let_go`. Raises `locks.LockHeld`,
        `ControllerStandsBy`.
        """
        ...

    def renew(self) -> None:
        """Show other processes that this one lives; called every few seconds while the pool is locked. Raises
        `ControllerReplaced` if another one has the lock.
        """
        ...

    def open(self) -> None:
        """Read the identity, or make the pool if that was asked for. Durable. Raises as `find` does."""
        ...

    def check_in_place(self) -> None:
        """Raise `PeerUnavailable` unless what was opened is still there. Cheap: called every second."""
        ...

    def let_go(self) -> None:
        """Hold nothing of the pool."""
        ...


class RecordKind(enum.Enum):
    """The kinds of records of a pool; the value names where an engine keeps them."""

    VOLUMES = "volumes"
    CONTENT = "content"
    SNAPSHOTS = "snapshots"


class RecordStore(Protocol):
    """The records of one kind, by id: bytes in and out. Each change is atomic and durable, from any thread.

    An id was checked to be one of this pool's before it comes here.
    """

    def ids(self) -> tuple[str, ...]:
        """The ids of all records."""
        ...

    def load(self, key: str) -> bytes | None:
        """A record, or None. Raises `Corrupt`, `Refused` or `RuntimeFailed` for one that cannot be read."""
        ...

    def save(self, key: str, data: bytes, *, previous: bytes) -> None:
        """Write a record in place of `previous`, which is what the caller has read.

        Raises `RecordChanged` if something else is there by now, or nothing; then nothing is written. After any other
        error either record may be there.
        """
        ...

    def shown(self, key: str) -> str:
        """Where a record is, for people."""
        ...
