"""The interface of an engine, which stores volumes: `Provisioning`, `NodeAccess`, their pool and its records.

`Provisioning` is for the controller part: it needs no device and no root. `NodeAccess` is for the node part
(`pool_access`). Handles are opaque to the driver, which only passes them on.

Every method is plain and may block. An operation calls it on a thread of the engine's own pool (docs/decisions/0021):
an engine that hangs takes only its own threads. An engine that calls a peer over the network gives each call some
seconds, and raises `PeerUnavailable` after them. Every change is idempotent and durable when it returns, and the
caller serialises changes of one volume. Methods read the state from the engine and the kernel, never from memory
alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from crust.blockdriver.engines.pool_access import NodeAccess, PoolHome, RecordKind, RecordStore
from crust.blockdriver.host.extents import Extent
from crust.core import errors, volumes
from crust.host.files.durable import Place

MODES = frozenset({
    volumes.AccessMode.SINGLE_NODE_WRITER, volumes.AccessMode.SINGLE_NODE_READER_ONLY,
    volumes.AccessMode.SINGLE_NODE_SINGLE_WRITER, volumes.AccessMode.SINGLE_NODE_MULTI_WRITER,
    volumes.AccessMode.MULTI_NODE_READER_ONLY,
})  # fmt: skip
"""The access modes of every engine. MULTI_NODE_READER_ONLY allows many nodes and requires none: the topology names
the node of a local volume. ReadOnlyMany PVCs arrive so."""


class ImageMissing(errors.Corrupt):
    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"the image of {volume_id} does not exist",
            why="the volume has a record, and the driver did not remove its image",
        )


class ImageReplaced(errors.Corrupt):
    def __init__(self, volume_id: str, device: str) -> None:
        super().__init__(
            f"the image of {volume_id} was replaced while it was attached",
            why=f"{device} has the earlier file, with all that was written since, and no file name leads to it",
            hint=f"copy from {device} what is needed; end the pods of the volume; then losetup -d {device}",
        )


class ForeignImage(errors.Corrupt):
    def __init__(self, volume_id: str, shown: str, use: str = "used") -> None:
        super().__init__(
            f"{volume_id} is not {use}",
            why=f"an image of that name is in {shown}, and the driver did not make it",
        )


def orphan_image(volume_id: str, present: str) -> errors.Corrupt:
    """The error for an image with the name of a volume and no volume record: no volume is made in its place."""
    return errors.Corrupt.named(
        "OrphanImage",
        f"{volume_id} is not created",
        why=f"{present} exists without a record of a volume",
    )


class StillAttached(errors.NotReady):
    def __init__(self, volume_id: str, place: str) -> None:
        super().__init__(f"{volume_id} is in use", why=f"it is attached as {place}")


@dataclass(frozen=True, slots=True)
class Image:
    """A snapshot for an engine: its id, its volume (an engine may keep it in the volume's image), its size."""

    snapshot_id: str
    volume_id: volumes.VolumeId
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PoolSpace:
    """A pool's space in bytes, now. `records.capacity` has the formula that it is for.

    `free_bytes` are what the medium has free for anybody. `own_bytes` are what the volumes and snapshots have of it,
    each byte once: at least, because all other used bytes count as others'. `snapshot_bytes` are what the snapshots
    have, each byte once: at most. Volumes and sets that are being made count in `own_bytes` alone. The engine needs
    `spare_bytes` itself: volumes never get them, at any overcommit. Of others' bytes `unseen_bytes` may be own.
    """

    free_bytes: int
    own_bytes: int = 0
    snapshot_bytes: int = 0
    spare_bytes: int = 0
    unseen_bytes: int = 0


class NoChangeTracking(errors.NotReady):
    def __init__(self, why: str) -> None:
        super().__init__("changed blocks cannot be computed", why=why)


class SnapshotMissing(errors.Corrupt):
    def __init__(self, snapshot_id: str) -> None:
        super().__init__(
            f"the image of {snapshot_id} does not exist",
            why="the snapshot has a record, and the driver did not remove its image",
        )


class Uncommitted(Protocol):
    """A volume or set that no other caller sees before `commit`."""

    def commit(self, records: Mapping[RecordKind, bytes]) -> None:
        """Make it exist, with its records, in one durable step; the last call. After an error it may exist."""


class NewVolume(Uncommitted, Protocol):
    """A volume during its creation; `commit` takes its two records. Each of the other calls gives it an image."""

    def create(self, size_bytes: int) -> None:
        """An image that reads as zeros. Raises `Exhausted`, `ForeignImage`."""

    def allocate(self, size_bytes: int) -> None:
        """Give the image all of its blocks, shared with none; only without a `thick_obstacle`. Raises `Exhausted`."""

    def restore(self, image: Image, size_bytes: int) -> None:
        """A snapshot's image, then zeros to `size_bytes`. Raises `SnapshotMissing`, `Exhausted`, `ForeignImage`."""

    def clone(self, source: volumes.VolumeId, *, source_bytes: int, size_bytes: int) -> None:
        """Like `restore`, from the present content of a volume, which must have `source_bytes`.

        Raises `ImageMissing`, and `Corrupt` for a truncated source.
        """


class NewSnapshotSet(Uncommitted, Protocol):
    """A set of snapshots during its creation; `commit` takes its record."""

    def take(self, image: Image) -> None:
        """Copy a volume's present content, including writes to this node's device; a second call replaces the copy.
        Raises `ImageMissing`, `Exhausted`.
        """

    def added_bytes(self) -> int:
        """The bytes that the copies add to the pool's `snapshot_bytes` when they are committed."""

    def moved_on(self, image: Image) -> bool:
        """Whether the volume may differ from its copy by now; only where `copies_at_once`.

        Writes to this node's device count. False is exact; True may be wrong.
        """


class Provisioning(Protocol):
    """The volumes and snapshot sets of a pool. Errors are crust's; sizes are bytes.

    A volume or set exists while it has its record. It appears by a `commit` and goes by `remove` or `remove_set`,
    each in one step. An unfinished one, half made or half removed after a crash or an error, has no record; the
    engine alone knows of it, and removes it (`settle`). Ids of sets are typed as ids of volumes in calls for both.
    """

    modes: frozenset[volumes.AccessMode]
    """The supported access modes of volumes with a filesystem."""
    raw_modes: frozenset[volumes.AccessMode]
    """The supported access modes of raw block volumes, at least `modes`: their writers can know of each other."""
    is_used_elsewhere: bool
    """Whether other nodes use volumes too, whose writers this node cannot freeze."""
    maximum_bytes: int
    """The size of the largest possible volume, at any free capacity (`Exhausted` is about that)."""

    def open(self) -> None:
        """Open, and settle all volumes and sets; once, before the records are read. The log has the failures."""

    def check_usable(self) -> None:
        """Raise `NotReady` if volumes cannot be made or attached now. Cheap: called every few seconds."""

    def making(self, volume_id: volumes.VolumeId) -> AbstractContextManager[NewVolume]:
        """Make a volume that does not exist, inside the block. Without a commit all of it is removed again.

        Settles the volume first. Raises OrphanImage for an image with its name and no record, and the errors of
        `settle`.
        """

    def remove(self, volume_id: volumes.VolumeId) -> None:
        """Remove a volume in one durable step, then free its space; absent is a success, and an image with its name
        and no record stays. Finishes an earlier removal. Its snapshots stay.

        Raises `StillAttached` and `ForeignImage`: then it exists as before.
        """

    def taking(
        self, set_id: str, images: Sequence[Image]
    ) -> AbstractContextManager[NewSnapshotSet]:
        """Take a set that does not exist, of `images`, inside the block. Without a commit all of it is removed again.

        Settles the set first. Raises the errors of `settle`, and OrphanImage if the engine can see images with its
        name and no record.
        """

    def remove_set(self, set_id: str, images: Sequence[Image]) -> None:
        """Remove a set, of `images`, in one durable step, then free its space; absent is a success. Finishes a
        removal that was begun. Volumes made from it do not change.
        """

    def unsettled(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes and sets that are half made or half removed, also by calls that run now."""

    def settle(self, volume_or_set_id: volumes.VolumeId) -> None:
        """End an unfinished volume or set as removed; none is a success.

        Raises `StillAttached` for a volume in use: it then takes a removal back, and the volume exists.
        """

    def check_image(self, volume_id: volumes.VolumeId) -> None:
        """Raise `ImageMissing` if a volume has no image, `ForeignImage` if the driver did not make it,
        `ImageReplaced` if its device on this node has another one.
        """

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int, *, thick: bool = False) -> None:
        """Grow the image to at least this size, if `thick` with its blocks. Raises `ImageMissing`, `Exhausted`."""

    def thick_obstacle(self) -> str:
        """The reason why volumes cannot have all of their blocks from the start, and keep them; empty if they can."""

    def space(self) -> PoolSpace:
        """The pool's space now, in constant time. Raises `NotReady` if the pool is absent."""

    def image_ids(self) -> frozenset[volumes.VolumeId]:
        """The ids of images, or of a volume's other files, recorded or not; without unsettled ones. Cheap."""

    def snapshot_ids(self) -> frozenset[str]:
        """The ids of all snapshot images, recorded or not; without unsettled ones. Only the pool's health uses it."""

    def image_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The image's size; 0 if there is no image. Raises an error if that is not seen."""

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        """The problem of an image of `size_bytes`; empty if there is none. Raises `ImageMissing`, `ImageReplaced`."""

    def copies_at_once(self) -> bool:
        """Whether snapshots and clones are atomic and immediate, also while the volume is written to."""

    def added_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The bytes that a snapshot of the volume would add to the pool's `snapshot_bytes` now."""

    def cloned_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The free bytes that a clone needs beside its own size: what its source then cannot write over."""

    def check_snapshot(self, image: Image) -> None:
        """Raise `SnapshotMissing` if a complete snapshot does not exist."""

    def allocated(self, image: Image, start: int = 0) -> Iterable[Extent]:
        """The parts of a snapshot that may hold data, ascending, without those that end before the byte `start`.

        The iterator may raise too: `SnapshotMissing`.
        """

    def changed(self, base: Image, target: Image, start: int = 0) -> Iterable[Extent]:
        """The parts in which two snapshots may differ, ascending; all other parts from the byte `start` on are equal.

        Raises `NoChangeTracking`, `SnapshotMissing`.
        """


SetLimits = Callable[[volumes.VolumeId, volumes.IoLimits], None]
"""Sets all limits of a volume's I/O, also while it is used. Raises `ImageMissing`."""
Fence = Callable[[Iterable[volumes.VolumeId], frozenset[str]], frozenset[str]]
"""Frees volumes from nodes that are declared gone, whose later writes fail; returns the nodes that still have a
volume. It leaves a connected node alone, because that lives. Raises `PeerUnavailable`."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine with one pool, as the driver sees it."""

    home: PoolHome
    provisioning: Provisioning
    access: NodeAccess
    records: Callable[[RecordKind], RecordStore]
    set_limits: SetLimits | None = None
    """If the storage itself enforces limits, on every node."""
    tool_locks: Place | None = None
    """The file for the locks of programs that run on volumes, if the pool is a directory of this node."""
    fence: Fence | None = None
    """If several nodes reach the volumes."""
