"""A pool as an engine keeps it: its ids, its identity (`PoolHome`), and the records of what is in it (`RecordStore`).

The records lie with the images: a disk that is moved takes both along, and a cluster has both. A record is bytes
under an id; what it says is above this (`crust.blockdriver.records`). A writer names what it has read, so no write
undoes another's, in whatever process that was.

A record comes with what it describes and goes with it (`Provisioning.making`, `taking`, `remove`); here it is read
and replaced.

    volume           <pool id>-<hash of the name>
    snapshot         <pool id>-snap-<hash of the name>
    group snapshot   <pool id>-group-<hash of the name>
    its members      <pool id>-snap-<hash of the group's name>-<hash of the volume's id>

An id names its pool, so a request for another one is known without a look at the disk. And it follows from the name,
so a retried create finds what it began, at any number of volumes and whatever was lost on the way. Names never become
file names (they may hold "/" and 128 bytes of anything), and an id of a request becomes one only if it has one of
these forms.
"""

import enum
import hashlib
import re
from dataclasses import dataclass
from typing import Protocol

from crust.core import errors, volumes

POOL_ID = r"[0-9a-f]{16}"
_HASH = r"[0-9a-f]{40}"
_VOLUME = re.compile(f"{POOL_ID}-{_HASH}")
_SNAPSHOT = re.compile(f"{POOL_ID}-snap-{_HASH}(-{_HASH})?")
_GROUP = re.compile(f"{POOL_ID}-group-{_HASH}")


def digest(name: str) -> str:
    """The part of an id that follows from the name, the same in each pool."""
    return hashlib.sha256(name.encode()).hexdigest()[:40]


def pool_of(text: str) -> str:
    """The pool that an id names; empty if it has none of the forms above."""
    is_id = any(form.fullmatch(text) for form in (_VOLUME, _SNAPSHOT, _GROUP))
    return text.partition("-")[0] if is_id else ""


def set_of(snapshot_id: str) -> str:
    """The set that a snapshot is taken and deleted with: its group, or itself alone."""
    pool_id, _, rest = snapshot_id.partition("-snap-")
    group, _, member = rest.partition("-")
    return f"{pool_id}-group-{group}" if member else snapshot_id


def check_file_name(text: str) -> None:
    """Raise `errors.InvalidRequest` for what may be no id, and could lead elsewhere as the name of a file."""
    if not text.replace("-", "").isalnum() or not text.isascii():
        raise errors.InvalidRequest(f"{text!r} cannot be the name of an image")


@dataclass(frozen=True, slots=True)
class PoolIds:
    """The ids of one pool."""

    pool_id: str

    def volume_id(self, name: str) -> volumes.VolumeId:
        """The id of the volume called `name`."""
        return volumes.VolumeId(f"{self.pool_id}-{digest(name)}")

    def snapshot_id(self, name: str) -> str:
        """The id of the snapshot called `name`."""
        return f"{self.pool_id}-snap-{digest(name)}"

    def member_id(self, group_name: str, volume_id: str) -> str:
        """The id of a group's snapshot of a volume."""
        return f"{self.snapshot_id(group_name)}-{digest(volume_id)}"

    def group_id(self, name: str) -> str:
        """The id of the group snapshot called `name`."""
        return f"{self.pool_id}-group-{digest(name)}"

    def is_volume_id(self, text: str) -> bool:
        """Whether this pool could have a volume of that id."""
        return text.startswith(f"{self.pool_id}-") and _VOLUME.fullmatch(text) is not None

    def is_snapshot_id(self, text: str) -> bool:
        """Whether this pool could have a snapshot of that id, a single one or a member of a group."""
        return text.startswith(f"{self.pool_id}-") and _SNAPSHOT.fullmatch(text) is not None

    def is_group_id(self, text: str) -> bool:
        """Whether this pool could have a group snapshot of that id."""
        return text.startswith(f"{self.pool_id}-") and _GROUP.fullmatch(text) is not None

    def is_set_id(self, text: str) -> bool:
        """Whether this pool could have a group snapshot, or a single snapshot, of that id."""
        return self.is_group_id(text) or (self.is_snapshot_id(text) and set_of(text) == text)

    def check(self, text: str) -> None:
        """Raise `IdOfOtherPool` for an id of another pool.

        For calls that answer OK for an absent object: an object of another pool is not deleted.
        """
        other = pool_of(text)
        if other not in ("", self.pool_id):
            raise errors.NotFound.named(
                "IdOfOtherPool",
                f"there is no {text} here",
                why=f"its id names another pool, and this one is {self.pool_id}",
                hint="send the request to the driver that serves that pool",
            )


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
