"""What the driver needs of whatever holds the bytes.

A volume is an id and a size. `attach` makes it usable on this node, which need not mean a block device of this host:
an image that a hypervisor opens itself, over the network, has none. So creating, deleting, copying, listing and
looking never ask for a device, and what cannot be done without one, a host mount above all, is refused where it is
asked for (`NoHostDevice`).

Every method is plain and may block: the driver makes one hop to a thread per operation. Every change is idempotent
and durable when it returns, and is serialised per volume by the caller. State is read from the engine and the
kernel, never from memory alone.
"""

from dataclasses import dataclass
from typing import Protocol

from crust import errors, volumes

Source = volumes.BlockSource
"""How this host reaches the bytes."""


class ImageMissing(errors.Corrupt):
    """A volume is on record and its bytes are gone."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"the image of {volume_id} is gone",
            why="the driver has the volume on record and did not remove its image",
            hint="restore the image; the record is kept",
        )
        self.volume_id = volume_id


class StillAttached(errors.NotReady):
    """A volume cannot be removed while this node uses it."""

    def __init__(self, volume_id: str, where: str) -> None:
        super().__init__(
            f"{volume_id} is in use", why=f"it is attached as {where}", hint="unstage it first"
        )
        self.volume_id = volume_id


class NoHostDevice(errors.NotReady):
    """A volume that this host has no block device of: only a hypervisor opens it."""

    def __init__(self) -> None:
        super().__init__(
            "the volume cannot be used on this host",
            why="its engine gives it to hypervisors alone, and makes no device of it here",
            hint="publish it with deferral, to a runtime that opens such images",
        )


@dataclass(frozen=True, slots=True)
class Attachment:
    """A volume that is usable on this node; `device` is None where only a hypervisor opens it."""

    device: Source | None
    size_bytes: int

    @property
    def source(self) -> Source:
        """The device, for what cannot be done without it; raises `NoHostDevice`."""
        if self.device is None:
            raise NoHostDevice()
        return self.device

    @property
    def shown(self) -> str:
        """Where it is, for people."""
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
    """A pool's space in bytes: what it can hold of ours, what can still be written, and the blocks of its snapshots.

    `size_bytes` leaves out what others keep there. In `snapshot_bytes` a shared block counts once per snapshot.
    """

    size_bytes: int
    free_bytes: int
    snapshot_bytes: int


class NoChangeTracking(errors.NotReady):
    """The engine cannot tell which blocks differ (CSI GetMetadataDelta: FAILED_PRECONDITION)."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "changed blocks are not known",
            why=why,
            hint="compare the snapshots' content, or use the list of allocated blocks",
        )


class SnapshotMissing(errors.Corrupt):
    """A snapshot is on record and its bytes are gone."""

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(
            f"the image of {snapshot_id} is gone",
            why="the driver has the snapshot on record and did not remove its image",
            hint="restore the image, or delete the snapshot",
        )
        self.snapshot_id = snapshot_id


class Backend(Protocol):
    """The bytes of volumes. Errors are crust's; sizes are bytes."""

    @property
    def modes(self) -> frozenset[volumes.AccessMode]:
        """The access modes that can be honoured."""
        ...

    def open(self) -> None:
        """Get ready; called once, before anything else."""
        ...

    def check(self) -> None:
        """Raise `NotReady` if volumes cannot be made or attached now. Cheap: asked every few seconds."""
        ...

    def exists(self, volume_id: volumes.VolumeId) -> bool:
        """Whether there are bytes under this id."""
        ...

    def create(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Make an image that reads as zeros, or finish making one. Raises `Exhausted`."""
        ...

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Make the image at least so large. Raises `ImageMissing`, `Exhausted`."""
        ...

    def delete(self, volume_id: volumes.VolumeId) -> None:
        """Remove the image; absent is fine. Raises `StillAttached`."""
        ...

    def maximum_bytes(self) -> int:
        """The largest volume that the engine can hold, whatever room there is (`Exhausted` is for room)."""
        ...

    def space(self) -> PoolSpace:
        """The pool's space at this moment; costs the same whatever is in it. Raises `NotReady` if it is away."""
        ...

    def image_ids(self) -> frozenset[volumes.VolumeId]:
        """Every image of a volume there is, recorded or not. Cheap."""
        ...

    def snapshot_ids(self) -> frozenset[str]:
        """Every snapshot there is, recorded or not. Asked for the pool's health alone."""
        ...

    def attach(self, volume_id: volumes.VolumeId) -> Attachment:
        """Make the volume usable here, once however often it is asked. Raises `ImageMissing`, `Exhausted`."""
        ...

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes that may be attached on this node, whoever attached them."""
        ...

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """How the volume is usable here at this moment, if it is."""
        ...

    def strays(self) -> tuple[Attachment, ...]:
        """What this engine attached here for volumes whose bytes are gone or were replaced since; nobody else's."""
        ...

    def drop(self, stray: Attachment) -> None:
        """Undo the attachment of a stray; one that is none any more is fine. Raises `NotReady` while in use."""
        ...

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """Let an attached volume take its image's size; None when it is not attached."""
        ...

    def detach(self, volume_id: volumes.VolumeId) -> None:
        """Undo `attach`, and see that it is undone; not attached is fine. Raises `NotReady` while in use."""
        ...

    def attach_limit(self) -> int:
        """How many volumes this node can have attached at once; 0 when nothing limits it."""
        ...

    def trouble(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        """What is wrong with the image, which should have `size_bytes`; empty when nothing is."""
        ...

    def copies_at_once(self) -> bool:
        """Whether snapshots and clones are of one moment, and take no time, while the volume is written to."""
        ...

    def copy_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The room that a snapshot of the volume would take now; 0 where it shares with the volume."""
        ...

    def take_snapshot(self, image: Image) -> None:
        """Keep the volume's bytes as they are now, all that was written to this node's device included.

        In place of an image of that id, whole or not. Raises `ImageMissing`, `Exhausted`.
        """
        ...

    def moved_on(self, image: Image) -> bool:
        """Whether the volume may hold something else by now than its snapshot; only where `copies_at_once`.

        What was written to this node's device counts. False is exact; True errs on the safe side.
        """
        ...

    def delete_snapshot(self, image: Image) -> None:
        """Forget a snapshot; absent is fine. What was made of it does not change."""
        ...

    def restore(self, volume_id: volumes.VolumeId, image: Image, size_bytes: int) -> None:
        """Make the volume's image from a snapshot, with zeros behind it up to `size_bytes`.

        In place of one of that id, whole or not. Raises `SnapshotMissing`, `Exhausted`.
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

        Raises `ImageMissing`, `Exhausted`, and `Corrupt` for a source that was cut short.
        """
        ...

    def allocated(self, image: Image) -> tuple[Region, ...]:
        """The parts of a snapshot that may hold something else than zeros, ascending. Raises `SnapshotMissing`."""
        ...

    def changed(self, base: Image, target: Image) -> tuple[Region, ...]:
        """The parts in which two snapshots may differ, ascending; what is left out is equal.

        Raises `NoChangeTracking`, `SnapshotMissing`.
        """
        ...
