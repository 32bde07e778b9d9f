"""CreateSnapshot, DeleteSnapshot, and the taking of several at once.

Taking: records in phase "creating", then everything that is mounted stands still, first in guests, then here; then
the images; then all goes on; then "ready". "Ready" comes after the last thaw, because a guest tells only then whether
it stood still. A failure leaves nothing; what a crash leaves is thrown away at the next start, where a freeze is
undone too: a retry then takes the snapshot anew. An id follows from the name, so a retry finds what was finished.

Raw devices in use cannot be held. Of a group with one, it is copied while the others stand still. Several are copied
one after the other, and looked at again: if none but the last has changed since its copy, all copies are of the
moment of the last one. If one has, they are copied again, a few times; then the group is refused
(`RawDevicesNeverIdle`).
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from crust import errors, volumes
from crust.blockdriver.engines.protocol import Backend, Image
from crust.blockdriver.records.content_records import ContentRecords
from crust.blockdriver.records.pool import Pool
from crust.blockdriver.records.snapshot_record import (
    SnapshotRecord,
    SnapshotRecords,
)
from crust.blockdriver.records.volume_records import VolumeRecords
from crust.blockdriver.snapshots import quiesce
from crust.blockdriver.snapshots.guest_freeze import GuestFreezer
from crust.blockdriver.snapshots.host_freeze import Freezer
from crust.blockdriver.snapshots.quiesce import QuiescePlan, VolumeUse

_ROUNDS = 8


class SnapshotNotFound(errors.NotFound):
    """No snapshot of this id exists."""

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"there is no snapshot {snapshot_id!r}")
        self.snapshot_id = snapshot_id


class SnapshotNameTaken(errors.Conflict):
    """The name is taken by a snapshot of another volume (CSI CreateSnapshot: ALREADY_EXISTS)."""

    def __init__(self, name: str, source_volume_id: str) -> None:
        super().__init__(
            f"the snapshot {name!r} exists already",
            why=f"it is one of {source_volume_id}",
            hint="choose another name, or delete it first",
        )
        self.name = name


class SnapshotBelongsToGroup(errors.InvalidRequest):
    """A group's snapshots are deleted with their group (CSI DeleteSnapshot)."""

    def __init__(self, snapshot_id: str, group_id: str) -> None:
        super().__init__(
            f"{snapshot_id} is not deleted alone",
            why=f"it belongs to the group snapshot {group_id}",
            hint="call DeleteVolumeGroupSnapshot",
        )
        self.snapshot_id = snapshot_id
        self.group_id = group_id


class RawDevicesNeverIdle(errors.OperationPending):
    """Several raw devices of a group were written to whenever they were looked at."""

    def __init__(self, volume_ids: Sequence[str]) -> None:
        super().__init__(
            f"{', '.join(volume_ids)} are not copied at one moment",
            why=f"they are raw devices, and in {_ROUNDS} rounds one was written to before the last was copied",
            hint="retry, let their users pause, or unpublish them",
        )
        self.volume_ids = tuple(volume_ids)


class Reservations(Protocol):
    """Keeps others from the capacity that a copy is about to take."""

    def set_aside(self, what: str, size_bytes: int) -> None:
        """Until `give_back`. Raises `Exhausted` if the pool has less."""
        ...

    def give_back(self, what: str) -> None:
        """It is written, or will not be."""
        ...


@dataclass(frozen=True, slots=True)
class VolumeSnapshots:
    """Takes and removes snapshots. The caller sees to it that nobody else operates on what they name.

    `snapshot_records` has the records. What is not async blocks.
    """

    pool: Pool
    volume_records: VolumeRecords
    content_records: ContentRecords
    snapshot_records: SnapshotRecords[SnapshotRecord]
    backend: Backend
    node: VolumeUse
    capacity: Reservations
    freezer: Freezer
    guest_freezer: GuestFreezer

    async def create(self, name: str, volume_id: volumes.VolumeId) -> SnapshotRecord:
        """Take a snapshot, or find that it is taken.

        Raises `SnapshotNameTaken`, `volume_records.VolumeNotFound`, the errors of `quiesce.check`,
        `freezes.FrozenTooLong`, those of `GuestFreezer.still`, `ImageMissing`, `Exhausted`.
        """
        record = await asyncio.to_thread(self._present_or_plan, name, volume_id)
        return record if record.phase == "ready" else (await self.take([record]))[0]

    def _present_or_plan(self, name: str, volume_id: volumes.VolumeId) -> SnapshotRecord:
        present = self.snapshot_records.find(self.pool.ids.snapshot_id(name))
        if present is not None and present.phase != "ready":  # nobody was told of it
            self.discard(present)
            present = None
        if present is None:
            return self.plan(volume_id, self.pool.ids.snapshot_id(name), name)
        if present.source_volume_id != volume_id:
            raise SnapshotNameTaken(name, present.source_volume_id)
        return present

    def plan(
        self, volume_id: volumes.VolumeId, snapshot_id: str, name: str, *, group_id: str = ""
    ) -> SnapshotRecord:
        """The record of a snapshot that is to be taken of a volume, with what is known of its bytes now.

        Raises `volume_records.VolumeNotFound`, `content_records.ContentRecordMissing`.
        """
        record, known = self.volume_records.load(volume_id), self.content_records.load(volume_id)
        return SnapshotRecord(
            snapshot_id=snapshot_id,
            name=name,
            phase="creating",
            source_volume_id=record.volume_id,
            size_bytes=record.capacity_bytes,
            created_ns=0,
            state=known.state,
            fs_type=known.fs_type,
            filled_bytes=known.filled_bytes,
            in_guest=known.in_guest,
            group_id=group_id,
        )

    async def take(self, plans: Sequence[SnapshotRecord]) -> tuple[SnapshotRecord, ...]:
        """Take all of `plans` at one moment, or none. Raises what `create` does, and `RawDevicesNeverIdle`."""
        try:
            moving = await asyncio.to_thread(self._begin, plans)
            async with self.guest_freezer.still(moving.in_guests):
                moment_ns = await asyncio.to_thread(self._copy, plans, moving)
        except errors.CrustError:
            await asyncio.to_thread(self._discard_all, plans)
            raise
        finally:
            for each in plans:
                self.capacity.give_back(each.snapshot_id)
        return await asyncio.to_thread(self._settle, plans, moment_ns)

    def _begin(self, plans: Sequence[SnapshotRecord]) -> QuiescePlan:
        sources = [volumes.VolumeId(each.source_volume_id) for each in plans]
        moving = quiesce.check(self.node, sources, at_once=self.backend.copies_at_once())
        for each in plans:
            source = volumes.VolumeId(each.source_volume_id)
            self.capacity.set_aside(each.snapshot_id, self.backend.copy_bytes(source))
            self.snapshot_records.save(each)
        return moving

    def _copy(self, plans: Sequence[SnapshotRecord], moving: QuiescePlan) -> int:
        """Copy all while what can be held is held; answers the moment."""
        raw = [each for each in plans if each.source_volume_id in moving.raw]
        with self.freezer.frozen(moving.here):
            for each in plans:
                if each not in raw:
                    self.backend.take_snapshot(image_of(each))
            return self._copy_unheld([image_of(each) for each in raw])

    def _copy_unheld(self, images: Sequence[Image]) -> int:
        """Copy what nobody holds, last: all of it is of the moment of the last copy, if the others are as then."""
        for _ in range(_ROUNDS):
            for each in images:
                moment_ns = time.time_ns()
                self.backend.take_snapshot(each)
            if not any(self.backend.moved_on(each) for each in images[:-1]):
                return moment_ns if images else time.time_ns()
        raise RawDevicesNeverIdle([each.volume_id for each in images])

    def _settle(
        self, plans: Sequence[SnapshotRecord], moment_ns: int
    ) -> tuple[SnapshotRecord, ...]:
        ready = {"phase": "ready", "created_ns": moment_ns}
        return tuple(self.snapshot_records.save(each.model_copy(update=ready)) for each in plans)

    def _discard_all(self, plans: Sequence[SnapshotRecord]) -> None:
        for each in plans:
            if self.snapshot_records.find(each.snapshot_id) is not None:
                self.discard(each)

    def find(self, snapshot_id: str) -> SnapshotRecord:
        """A snapshot that is ready; raises `SnapshotNotFound`."""
        record = self.snapshot_records.find(snapshot_id)
        if record is None or record.phase != "ready":
            raise SnapshotNotFound(snapshot_id)
        return record

    def delete(self, snapshot_id: str) -> None:
        """Remove a snapshot; absent is fine. Raises `pool.IdOfOtherPool`, `SnapshotBelongsToGroup`."""
        self.pool.ids.check(snapshot_id)
        record = self.snapshot_records.find(snapshot_id)
        if record is None:
            return
        if record.group_id:
            raise SnapshotBelongsToGroup(snapshot_id, record.group_id)
        self.discard(record)

    def discard(self, record: SnapshotRecord) -> None:
        """Remove a snapshot, whoever's, in an order that a crash may cut anywhere.

        A full disk has no room for the intent, and needs this most: then it is the caller's retry that goes on.
        """
        with suppress(errors.Exhausted):
            self.snapshot_records.save(record.model_copy(update={"phase": "deleting"}))
        self.backend.delete_snapshot(image_of(record))
        self.snapshot_records.remove(record.snapshot_id)

    def recover(self) -> None:
        """Throw away what an earlier life did not finish taking, and finish what it was removing."""
        for record in self.snapshot_records.unfinished():
            self.discard(record)


def image_of(record: SnapshotRecord) -> Image:
    """The snapshot as the engine knows it."""
    return Image(record.snapshot_id, volumes.VolumeId(record.source_volume_id), record.size_bytes)
