"""A pool as its engine gives it to the driver: its ids, its identity (`PoolHome`), the records of what is in it
(`RecordStore`), and its volumes on this node (`NodeAccess`).

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

A volume on a node need not be a block device of this host: an image that a hypervisor opens itself has none, and a
call that does need one, a host mount above all, is refused (`NoHostDevice`). The rules of `protocol` hold here too.
"""

import enum
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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

    def check_own_pool(self, text: str) -> None:
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


class NoHostDevice(errors.NotReady):
    """A volume without a block device on this host: only a hypervisor opens it."""

    def __init__(
        self, why: str = "its engine makes no block device: only a hypervisor can open it"
    ) -> None:
        super().__init__(
            "the volume cannot be used on this host",
            why=why,
            hint="publish it with deferral, to a runtime that opens such images",
        )


@dataclass(frozen=True, slots=True)
class Attachment:
    """A volume that is usable on this node: by a device of this host, or as an image that only a hypervisor opens."""

    source: volumes.BlockSource | volumes.NetworkImage
    size_bytes: int
    is_new: bool = field(default=False, compare=False)
    """Whether the call that returned it has made the device: then no process has opened that before."""

    @property
    def device(self) -> volumes.BlockSource | None:
        """The device of this host; None where only a hypervisor opens the volume."""
        return self.source if isinstance(self.source, volumes.BlockSource) else None

    @property
    def host_device(self) -> volumes.BlockSource:
        """The device of this host; raises `NoHostDevice` if there is none."""
        if not isinstance(self.source, volumes.BlockSource):
            raise NoHostDevice()
        return self.source

    @property
    def shown(self) -> str:
        """The device or image, for messages."""
        if isinstance(self.source, volumes.BlockSource):
            return self.source.path
        return f"{self.source}, which only a hypervisor opens"


@dataclass(frozen=True, slots=True)
class Access:
    """How a volume is to be attached. `secrets` came with the call: they are kept in memory only, and never shown."""

    mode: volumes.AccessMode = volumes.AccessMode.SINGLE_NODE_WRITER
    readonly: bool = False
    on_host: bool = False
    """Whether this host itself uses it, by a block device; else a hypervisor may open it. Engines whose volumes are
    such devices anyway need not look."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


READ_WRITE = Access()


class NodeAccess(Protocol):
    """The volumes that this node uses. Errors are crust's; sizes are bytes."""

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Take the credentials that a call brought for a volume, and for the records of its pool, in memory, until
        `detach`; before anything else of the call. An engine that needs none ignores them. Raises `Refused` for those
        that the storage does not accept, `NotReady` if there are none and none are known.
        """
        ...

    def attach(self, volume_id: volumes.VolumeId, access: Access = READ_WRITE) -> Attachment:
        """Attach the volume on this node; idempotent. Raises `ImageMissing`, `Exhausted`; `NoHostDevice` where a
        device of this host is asked for, and cannot be made.

        With an access that writes the node is the volume's only writer until `detach`, durably, where another node
        could reach the image; raises `NotReady` naming the holder while another one has it.
        """
        ...

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes that may be attached on this node, whichever process attached them."""
        ...

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """How the volume is attached on this node now, if it is."""
        ...

    def host_device(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """The attachment, if this host itself has a device of the volume. Asks this host alone, and no storage."""
        ...

    def orphans(self) -> tuple[Attachment, ...]:
        """Attachments that this engine made for images that were removed or replaced since; no others."""
        ...

    def drop(self, orphan: Attachment) -> None:
        """Detach an orphan; one that is detached is a success. Raises `NotReady` while in use."""
        ...

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """Give an attached volume's device its image's size; None when it is not attached."""
        ...

    def is_empty(self, volume_id: volumes.VolumeId) -> bool:
        """Whether the engine stores no data for the volume, so that every byte of it reads as zero.

        What was written to this node's device counts once it is written back (`devices.sync`). True is exact; False
        may be wrong. Raises `ImageMissing`.
        """
        ...

    def detach(self, volume_id: volumes.VolumeId) -> None:
        """Detach, and verify it; not attached is a success. Raises `NotReady` while in use."""
        ...
