"""CreateSnapshot, DeleteSnapshot, and the taking of several at once.

Taking: records in phase "creating", then everything that is mounted stands still, then the images, then it goes on,
then "ready". A failure leaves nothing; what a crash leaves is thrown away at the next start, where a freeze is undone
too: a retry then takes the snapshot anew. An id follows from the name, so a retry finds what was finished.
"""

import time
from collections.abc import Sequence

from crust import errors, volumes
from crust.blockdriver import standstill
from crust.blockdriver.backends.protocol import Image
from crust.blockdriver.freezes import Freezer
from crust.blockdriver.record import Record
from crust.blockdriver.snapshot_record import Shelf, SnapshotRecord, snapshot_id_of
from crust.blockdriver.state import State


class SnapshotNotFound(errors.NotFound):
    """No snapshot of this id exists."""

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"there is no snapshot {snapshot_id!r}")
        self.snapshot_id = snapshot_id


class SnapshotOfAnother(errors.Conflict):
    """The name is taken by a snapshot of another volume (CSI CreateSnapshot: ALREADY_EXISTS)."""

    def __init__(self, name: str, source_volume_id: str) -> None:
        super().__init__(
            f"the snapshot {name!r} exists already",
            why=f"it is one of {source_volume_id}",
            hint="choose another name, or delete it first",
        )
        self.name = name


class MemberOfGroup(errors.InvalidRequest):
    """A group's snapshots are deleted with their group (CSI DeleteSnapshot)."""

    def __init__(self, snapshot_id: str, group_id: str) -> None:
        super().__init__(
            f"{snapshot_id} is not deleted alone",
            why=f"it belongs to the group snapshot {group_id}",
            hint="call DeleteVolumeGroupSnapshot",
        )
        self.snapshot_id = snapshot_id
        self.group_id = group_id


class Snapshotter:
    """Takes and removes snapshots. Methods block; the caller sees to it that nobody else operates on what they name.

    `shelf` has the records.
    """

    def __init__(self, shared: State, shelf: Shelf[SnapshotRecord], freezer: Freezer) -> None:
        self._state = shared
        self._freezer = freezer
        self.shelf = shelf

    def create(self, name: str, volume_id: volumes.VolumeId) -> SnapshotRecord:
        """Take a snapshot, or find that it is taken.

        Raises `SnapshotOfAnother`, `registry.VolumeNotFound`, the errors of `standstill.check`,
        `freezes.FrozenTooLong`, `ImageMissing`, `Exhausted`.
        """
        present = self.shelf.find(snapshot_id_of(name))
        if present is not None and present.phase == "deleting":
            self.discard(present)
            present = None
        if present is not None and present.source_volume_id != volume_id:
            raise SnapshotOfAnother(name, present.source_volume_id)
        if present is not None and present.phase == "ready":
            return present
        record = self._state.registry.load(volume_id)
        return self.take([plan(record, snapshot_id_of(name), name)])[0]

    def take(self, plans: Sequence[SnapshotRecord]) -> tuple[SnapshotRecord, ...]:
        """Take all of `plans` at one moment, or none. Raises what `create` does."""
        together = len(plans) > 1
        volume_ids = [volumes.VolumeId(each.source_volume_id) for each in plans]
        moving = [standstill.check(self._state, each, together=together) for each in volume_ids]
        for each in plans:
            self.shelf.save(each)
        try:
            with self._freezer.frozen([each for each in moving if each is not None]):
                moment_ns = time.time_ns()
                for each in plans:
                    self._state.backend.take_snapshot(image_of(each))
        except errors.CrustError:
            for each in plans:
                self.discard(each)
            raise
        ready = {"phase": "ready", "created_ns": moment_ns}
        return tuple(self.shelf.save(each.model_copy(update=ready)) for each in plans)

    def find(self, snapshot_id: str) -> SnapshotRecord:
        """A snapshot that is ready; raises `SnapshotNotFound`."""
        record = self.shelf.find(snapshot_id)
        if record is None or record.phase != "ready":
            raise SnapshotNotFound(snapshot_id)
        return record

    def delete(self, snapshot_id: str) -> None:
        """Remove a snapshot; absent is fine. Raises `MemberOfGroup`."""
        record = self.shelf.find(snapshot_id)
        if record is None:
            return
        if record.group_id:
            raise MemberOfGroup(snapshot_id, record.group_id)
        self.discard(record)

    def discard(self, record: SnapshotRecord) -> None:
        """Remove a snapshot, whoever's, in an order that a crash may cut anywhere."""
        self.shelf.save(record.model_copy(update={"phase": "deleting"}))
        self._state.backend.delete_snapshot(image_of(record))
        self.shelf.remove(record.snapshot_id)

    def recover(self) -> None:
        """Throw away what an earlier life did not finish taking, and finish what it was removing."""
        for record in self.shelf.unfinished():
            self.discard(record)


def plan(record: Record, snapshot_id: str, name: str, *, group_id: str = "") -> SnapshotRecord:
    """The record of a snapshot that is to be taken of a volume."""
    return SnapshotRecord(
        snapshot_id=snapshot_id,
        name=name,
        phase="creating",
        source_volume_id=record.volume_id,
        size_bytes=record.capacity_bytes,
        created_ns=0,
        content=record.content,
        fs_type=record.fs_type,
        filled_bytes=record.filled_bytes,
        group_id=group_id,
    )


def image_of(record: SnapshotRecord) -> Image:
    """The snapshot as the engine knows it."""
    return Image(record.snapshot_id, volumes.VolumeId(record.source_volume_id), record.size_bytes)
