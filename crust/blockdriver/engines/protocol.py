"""What the driver needs of an engine, which stores the bytes of volumes.

A volume is an id and a size. `attach` makes it usable on this node, which need not mean a block device of this host:
an image that a hypervisor opens itself, over the network, has none. So create, delete, copy, list and the health
checks need no device, and a call that does need one, a host mount above all, is refused (`NoHostDevice`).

Every method is plain and may block: the driver makes one hop to a thread per operation. Every change is idempotent
and durable when it returns, and the caller serialises changes of one volume. State is read from the engine and the
kernel, never from memory alone.
"""

from dataclasses import dataclass
from typing import Protocol

from crust import errors, volumes

Source = volumes.BlockSource
"""How this host reaches the bytes."""


class ImageMissing(errors.Corrupt):
    """A volume has a record, but its image does not exist."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"the image of {volume_id} does not exist",
            why="the volume has a record, and the driver did not remove its image",
            hint="restore the image; the record is kept",
        )
        self.volume_id = volume_id


class StillAttached(errors.NotReady):
    """A volume is attached on this node, and cannot be removed or moved."""

    def __init__(self, volume_id: str, where: str) -> None:
        super().__init__(
            f"{volume_id} is in use", why=f"it is attached as {where}", hint="unstage it first"
        )
        self.volume_id = volume_id


class NoHostDevice(errors.NotReady):
    """A volume without a block device on this host: only a hypervisor opens it."""

    def __init__(self) -> None:
        super().__init__(
            "the volume cannot be used on this host",
            why="its engine makes no block device: only a hypervisor can open it",
            hint="publish it with deferral, to a runtime that opens such images",
        )


@dataclass(frozen=True, slots=True)
class Attachment:
    """A volume that is usable on this node; `device` is None where only a hypervisor opens it."""

    device: Source | None
    size_bytes: int

    @property
    def source(self) -> Source:
        """The device; raises `NoHostDevice` if there is none."""
        if self.device is None:
            raise NoHostDevice()
        return self.device

    @property
    def shown(self) -> str:
        """The device or image, for messages."""
        return self.device.path if self.device else "an image that only a hypervisor opens"


@dataclass(frozen=True, slots=True)
class Image:
    """A snapshot for an engine: its id, the volume it is of (an engine may keep it in that one's image), its size."""

    snapshot_id: str
    volume_id: volumes.VolumeId
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a volume or snapshot, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PoolSpace:
    """A pool's space in bytes: its size for our images, its free bytes, and the blocks of its snapshots.

    `size_bytes` excludes other files in the filesystem. In `snapshot_bytes` a shared block counts once per snapshot.
    """

    size_bytes: int
    free_bytes: int
    snapshot_bytes: int


class NoChangeTracking(errors.NotReady):
    """The engine cannot tell which blocks differ (CSI GetMetadataDelta: FAILED_PRECONDITION)."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "changed blocks cannot be computed",
            why=why,
            hint="compare the snapshots' content, or use the list of allocated blocks",
        )


class SnapshotMissing(errors.Corrupt):
    """A snapshot has a record, but its image does not exist."""

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(
            f"the image of {snapshot_id} does not exist",
            why="the snapshot has a record, and the driver did not remove its image",
            hint="restore the image, or delete the snapshot",
        )
        self.snapshot_id = snapshot_id


class Backend(Protocol):
    """An engine that stores volumes. Errors are crust's; sizes are bytes."""

    @property
    def modes(self) -> frozenset[volumes.AccessMode]:
        """The supported access modes."""
        ...

    def open(self) -> None:
        """Open the engine; called once, before anything else."""
        ...

    def check(self) -> None:
        """Raise `NotReady` if volumes cannot be made or attached now. Cheap: called every few seconds."""
        ...

    def exists(self, volume_id: volumes.VolumeId) -> bool:
        """Whether an image of this id exists."""
        ...

    def create(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Create an image that reads as zeros, or complete one. Raises `Exhausted`."""
        ...

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Grow the image to at least this size. Raises `ImageMissing`, `Exhausted`."""
        ...

    def delete(self, volume_id: volumes.VolumeId) -> None:
        """Remove the image; absent is a success. Raises `StillAttached`."""
        ...

    def maximum_bytes(self) -> int:
        """The largest possible volume, whatever the free capacity (for that there is `Exhausted`)."""
        ...

    def space(self) -> PoolSpace:
        """The pool's space now, in constant time. Raises `NotReady` if the pool is absent."""
        ...

    def image_ids(self) -> frozenset[volumes.VolumeId]:
        """The ids of all volume images, recorded or not. Cheap."""
        ...

    def snapshot_ids(self) -> frozenset[str]:
        """The ids of all snapshot images, recorded or not. Only the pool's health uses it."""
        ...

    def attach(self, volume_id: volumes.VolumeId) -> Attachment:
        """Attach the volume on this node; idempotent. Raises `ImageMissing`, `Exhausted`."""
        ...

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes that may be attached on this node, whichever process attached them."""
        ...

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """How the volume is attached on this node now, if it is."""
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

        What was written to this node's device counts. True is exact; False may be wrong. Raises `ImageMissing`.
        """
        ...

    def detach(self, volume_id: volumes.VolumeId) -> None:
        """Detach, and verify it; not attached is a success. Raises `NotReady` while in use."""
        ...

    def attach_limit(self) -> int:
        """How many volumes this node can have attached at once; 0 for no limit."""
        ...

    def image_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The image's size; 0 if there is none, or none that can be looked at."""
        ...

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        """The problem of an image that should have `size_bytes`; empty if there is none."""
        ...

    def copies_at_once(self) -> bool:
        """Whether snapshots and clones are atomic and immediate, also while the volume is written to."""
        ...

    def copy_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The capacity that a snapshot of the volume would take now; 0 where it shares blocks with the volume."""
        ...

    def take_snapshot(self, image: Image) -> None:
        """Copy the volume's present content, including what was written to this node's device.

        Replaces an image of that id, complete or not. Raises `ImageMissing`, `Exhausted`.
        """
        ...

    def moved_on(self, image: Image) -> bool:
        """Whether the volume may differ from its snapshot by now; only where `copies_at_once`.

        What was written to this node's device counts. False is exact; True may be wrong.
        """
        ...

    def delete_snapshot(self, image: Image) -> None:
        """Remove a snapshot; absent is a success. Volumes made from it do not change."""
        ...

    def restore(self, volume_id: volumes.VolumeId, image: Image, size_bytes: int) -> None:
        """Make the volume's image from a snapshot, with zeros after it up to `size_bytes`.

        Replaces an image of that id, complete or not. Raises `SnapshotMissing`, `Exhausted`.
        """
        ...

    def clone(
        self,
        volume_id: volumes.VolumeId,
        source: volumes.VolumeId,
        *,
        source_bytes: int,
        size_bytes: int,
    ) -> None:
        """Like `restore`, from a volume as it is now, which must have `source_bytes`.

        Raises `ImageMissing`, `Exhausted`, and `Corrupt` for a truncated source.
        """
        ...

    def allocated(self, image: Image) -> tuple[Region, ...]:
        """The parts of a snapshot that may be other than zeros, ascending. Raises `SnapshotMissing`."""
        ...

    def changed(self, base: Image, target: Image) -> tuple[Region, ...]:
        """The parts in which two snapshots may differ, ascending; what is left out is equal.

        Raises `NoChangeTracking`, `SnapshotMissing`.
        """
        ...
