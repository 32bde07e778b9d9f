"""A pool as its engine gives it to the driver: its ids, identity (`PoolHome`) and records (`RecordStore`), and its
volumes on this node (`NodeAccess`).

The records lie with the images: a disk that moves to another machine has both, and a cluster has both. A record is
bytes under an id; `crust.blockdriver.records` reads them. A writer names the bytes that it has read, so no write
undoes the write of another caller or process.

    volume           <pool id>-<hash of the name>
    snapshot         <pool id>-snap-<hash of the name>
    group snapshot   <pool id>-group-<hash of the name>
    its members      <pool id>-snap-<hash of the group's name>-<hash of the volume's id>

An id names its pool, so the driver knows a request for another pool without a look at the disk. And it follows from
the name, so a retried create finds its earlier work, even without any memory of it. Names never become file names
(they may hold "/" and 128 arbitrary bytes), and an id of a request becomes a file name only in one of these forms.

A volume on a node may have no block device of this host: a hypervisor opens its image itself. The driver refuses a
call that needs a device then, such as a host mount (`NoHostDevice`). The rules of `protocol` hold here too.
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
    """The pool that an id names; empty for any other text."""
    is_id = any(form.fullmatch(text) for form in (_VOLUME, _SNAPSHOT, _GROUP))
    return text.partition("-")[0] if is_id else ""


def set_of(snapshot_id: str) -> str:
    """The set of a snapshot: its group, or itself alone."""
    pool_id, _, hashes = snapshot_id.partition("-snap-")
    group, _, member = hashes.partition("-")
    return f"{pool_id}-group-{group}" if member else snapshot_id


def check_file_name(text: str) -> None:
    """Raise `errors.InvalidRequest` for a text that is no id and could name a file elsewhere."""
    if not text.replace("-", "").isalnum() or not text.isascii():
        raise errors.InvalidRequest(f"{text!r} cannot be the name of an image")


@dataclass(frozen=True, slots=True)
class PoolIds:
    pool_id: str

    def volume_id(self, name: str) -> volumes.VolumeId:
        return volumes.VolumeId(f"{self.pool_id}-{digest(name)}")

    def snapshot_id(self, name: str) -> str:
        return f"{self.pool_id}-snap-{digest(name)}"

    def member_id(self, group_name: str, volume_id: str) -> str:
        return f"{self.snapshot_id(group_name)}-{digest(volume_id)}"

    def group_id(self, name: str) -> str:
        return f"{self.pool_id}-group-{digest(name)}"

    def is_volume_id(self, text: str) -> bool:
        """Whether this pool could have a volume of that id."""
        return text.startswith(f"{self.pool_id}-") and _VOLUME.fullmatch(text) is not None

    def is_snapshot_id(self, text: str) -> bool:
        """Whether this pool could have a snapshot of that id, a single one or a member of a group."""
        return text.startswith(f"{self.pool_id}-") and _SNAPSHOT.fullmatch(text) is not None

    def is_group_id(self, text: str) -> bool:
        return text.startswith(f"{self.pool_id}-") and _GROUP.fullmatch(text) is not None

    def is_set_id(self, text: str) -> bool:
        """Whether this pool could have a group snapshot, or a single snapshot, of that id."""
        return self.is_group_id(text) or (self.is_snapshot_id(text) and set_of(text) == text)

    def check_own_pool(self, text: str) -> None:
        """Raise `IdOfOtherPool` for an id of another pool, whose object exists: no call answers that it is absent."""
        pool_id = pool_of(text)
        if pool_id not in ("", self.pool_id):
            raise errors.NotFound.named(
                "IdOfOtherPool",
                f"there is no {text} here",
                why=f"its id names another pool, and this one is {self.pool_id}",
            )


class PoolAbsent(errors.PeerUnavailable):
    """The pool of this driver is not at its place."""


class UnknownPoolLayout(errors.Corrupt):
    def __init__(
        self,
        shown: str,
        why: str,
        hint: str = "run the version of crust that wrote it; nothing was changed",
    ) -> None:
        super().__init__(f"the pool in {shown} is not opened", why=why, hint=hint)


class RecordChanged(errors.OperationPending):
    def __init__(self, shown: str) -> None:
        super().__init__(f"{shown} is not written", why="it has changed since it was read")


class PoolHome(Protocol):
    """The place of a pool, and the right to change it. A pool keeps the id of its creation."""

    shown: str
    """Its place, for people."""

    @property
    def ids(self) -> PoolIds:
        """The pool's ids, after `open`."""

    def find(self) -> None:
        """Check that the right pool is there, or may be made; no change. Raises `PoolAbsent`, `UnknownPoolLayout`."""

    def lock(self) -> None:
        """Take the pool's lock, for one process, until `let_go`. Raises `locks.LockHeld`, `ControllerStandsBy`."""

    def renew(self) -> None:
        """Show other processes that this one lives; called every few seconds while the pool is locked. Raises
        `ControllerReplaced` if another process has the lock.
        """

    def open(self) -> None:
        """Read the identity, or make the pool if the settings allow it. Durable. Raises as `find` does."""

    def check_in_place(self) -> None:
        """Raise `PeerUnavailable` unless the opened pool is still at its place. Cheap: called every second."""

    def let_go(self) -> None:
        """Release the lock, and every file of the pool."""


class RecordKind(enum.Enum):
    """The kinds of records of a pool; the value names the place of an engine for them."""

    VOLUMES = "volumes"
    CONTENT = "content"
    SNAPSHOTS = "snapshots"


class RecordStore(Protocol):
    """The records of one kind, by ids of this pool. Each change is atomic and durable, from any thread."""

    def ids(self) -> tuple[str, ...]:
        """The ids of all records; one may be of something whose record is absent."""

    def load(self, key: str) -> bytes | None:
        """A record, or None. Raises `Corrupt`, `Refused` or `RuntimeFailed` for an unreadable record."""

    def save(self, key: str, data: bytes, *, previous: bytes) -> None:
        """Write a record in place of `previous`, the bytes that the caller has read.

        Raises `RecordChanged`, without a write, if the store has other bytes by now, or no record. After any other
        error the store may have either record.
        """

    def shown(self, key: str) -> str:
        """The place of a record, for people."""


class NoHostDevice(errors.NotReady):
    def __init__(
        self, why: str = "its engine makes no block device: only a hypervisor can open it"
    ) -> None:
        super().__init__("the volume cannot be used on this host", why=why)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A volume that is usable on this node: by a device of this host, or as an image for a hypervisor only."""

    source: volumes.BlockSource | volumes.NetworkImage
    size_bytes: int
    is_new: bool = field(default=False, compare=False)
    """Whether the call that returned it has made the device, which then no process has opened before."""

    @property
    def device(self) -> volumes.BlockSource | None:
        """The device of this host; None if only a hypervisor opens the volume."""
        return self.source if isinstance(self.source, volumes.BlockSource) else None

    @property
    def host_device(self) -> volumes.BlockSource:
        """The device of this host; raises `NoHostDevice` if there is none."""
        if not isinstance(self.source, volumes.BlockSource):
            raise NoHostDevice()
        return self.source

    @property
    def shown(self) -> str:
        if isinstance(self.source, volumes.BlockSource):
            return self.source.path
        return f"{self.source}, which only a hypervisor opens"


@dataclass(frozen=True, slots=True)
class Access:
    """The kind of an attach. `secrets` are from the call: they stay in memory, and no message shows them."""

    mode: volumes.AccessMode = volumes.AccessMode.SINGLE_NODE_WRITER
    readonly: bool = False
    on_host: bool = False
    """Whether this host itself uses it, by a block device; else a hypervisor may open it. An engine that always makes
    devices ignores this."""
    keeps_blocks: bool = False
    """Whether a discard of its users must free no block, as for a thick volume."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


READ_WRITE = Access()


class NodeAccess(Protocol):
    """The volumes that this node uses. Errors are crust's; sizes are bytes."""

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Take the credentials of a call for a volume, and for the records of its pool, in memory, until `detach`;
        the first step of the call. An engine without credentials ignores them. Raises `Refused` for credentials that
        the storage does not accept, `NotReady` if neither this call nor an earlier one has any.
        """

    def attach(self, volume_id: volumes.VolumeId, access: Access = READ_WRITE) -> Attachment:
        """Attach the volume on this node; idempotent. Raises `ImageMissing`, `Exhausted`; `NoHostDevice` if the
        access needs a device of this host, and the engine cannot make it.

        With an access that writes, the node is the volume's only writer until `detach`, durably, if another node
        could reach the image; raises `NotReady` naming the holder while another node has it.
        """

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes that may be attached on this node, by any process."""

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """The present attachment of the volume on this node; None without one. Raises `ImageReplaced` if it has
        another image than the volume has now; so do `attach`, `refresh` and `detach`.
        """

    def host_device(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """The attachment, if this host has a device of the volume, whatever its image is now. Asks no storage."""

    def orphans(self) -> tuple[Attachment, ...]:
        """Attachments that this engine made for volumes or images that were removed since; no others."""

    def drop(self, orphan: Attachment) -> None:
        """Detach an orphan; a detached one is a success. Raises `NotReady` while in use."""

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """Give an attached volume's device its image's size; None when it is not attached."""

    def is_empty(self, volume_id: volumes.VolumeId) -> bool:
        """Whether the engine stores no data for the volume, so that every byte of it reads as zero.

        Writes to this node's device count once they are written back (`devices.write_back`). True is exact; False may
        be wrong. Raises `ImageMissing`.
        """

    def detach(self, volume_id: volumes.VolumeId) -> None:
        """Detach and verify; not attached is a success. Raises `NotReady` while in use."""
