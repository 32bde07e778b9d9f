"""CreateSnapshot, DeleteSnapshot, and taking several snapshots at once.

The order is: records in phase "creating"; freeze everything that is mounted, first in guests, then on this host; copy
the images; thaw; records in phase "ready". "Ready" comes after the last thaw, because only then a guest says whether
it was frozen. A failure leaves nothing. What a crash leaves is discarded at the next start, which also undoes
freezes; the CO's retry then takes the snapshot again. The id is derived from the name, so a retry finds a finished
snapshot.

A copy of a volume whose content record has changed since the plan, because a node was given it, is not used: the
snapshot would say that nobody ever wrote it, and a volume made from it would be formatted.

The writers of raw devices cannot be stopped, and those on other nodes are not known. In a group one such volume is
copied while the others are frozen. Several are copied one after the other and then checked: if none but the last was
written to since its copy, all copies are of the moment of the last one. Otherwise they are copied again, a few times;
then the group is refused (GroupNeverIdle).
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from crust.blockdriver.engines.protocol import Image, Provisioning
from crust.blockdriver.records.models import (
    ContentRecord,
    GroupRecord,
    SnapshotRecord,
    VolumeRecord,
)
from crust.blockdriver.records.pool import Pool
from crust.blockdriver.records.records import Records
from crust.blockdriver.snapshots import quiesce
from crust.blockdriver.snapshots.guest_freeze import GuestFreezer
from crust.blockdriver.snapshots.host_freeze import Freezer
from crust.blockdriver.snapshots.quiesce import QuiescePlan, VolumeUse
from crust.core import errors, volumes
from crust.host.process import workers

_ROUNDS = 8
_OF_CONTENT = ("state", "fs_type", "planned_uuid", "filled_bytes", "in_guest")
"""What a snapshot takes over of its volume's content record."""

_log = logging.getLogger(__name__)

SetRecord = TypeVar("SetRecord", SnapshotRecord, GroupRecord)


class ContentChanged(errors.OperationPending):
    """What is recorded of a volume's content has changed while the volume was copied."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"the copy of {volume_id} is not used",
            why="the volume was given to a node, or formatted, while it was copied",
            hint="retry: the call then copies it as it is now",
        )
        self.volume_id = volume_id


class Reservations(Protocol):
    """Reserves the capacity that a copy is about to take."""

    def set_aside(self, what: str, size_bytes: int) -> None:
        """Reserve until `give_back`. Raises `Exhausted` if the pool has less."""
        ...

    def give_back(self, what: str) -> None:
        """End the reservation: the copy is written, or was given up."""
        ...


@dataclass(frozen=True, slots=True)
class VolumeSnapshots:
    """Takes and deletes snapshots. The caller locks the volumes and snapshots.

    `snapshot_records` has the records. Methods that are not async block.
    """

    pool: Pool
    volume_records: Records[VolumeRecord]
    content_records: Records[ContentRecord]
    snapshot_records: Records[SnapshotRecord]
    groups: Records[GroupRecord]
    provisioning: Provisioning
    node: VolumeUse
    capacity: Reservations
    freezer: Freezer
    guest_freezer: GuestFreezer

    async def create(self, name: str, volume_id: volumes.VolumeId) -> SnapshotRecord:
        """Take a snapshot; taken already is a success, unless it is gone: its name stands for that moment alone.

        Raises `SnapshotNameTaken`, `models.VolumeNotFound`, the errors of `quiesce.check`,
        `freezes.FrozenTooLong`, those of `GuestFreezer.frozen`, `ImageMissing`, `ForeignImage`, `SnapshotMissing`,
        `Exhausted`.
        """
        record = await workers.run(self._present_or_plan, name, volume_id)
        return record if record.phase == "ready" else (await self.take([record]))[0]

    def _present_or_plan(self, name: str, volume_id: volumes.VolumeId) -> SnapshotRecord:
        present = self.snapshot_records.find(self.pool.ids.snapshot_id(name))
        if present is not None and present.phase != "ready":  # it was never answered
            self.discard(present)
            present = None
        if present is None:
            return self.plan(volume_id, self.pool.ids.snapshot_id(name), name)
        if present.source_volume_id != volume_id:
            raise errors.Conflict.named(
                "SnapshotNameTaken",
                f"the snapshot {name!r} exists already",
                why=f"it is a snapshot of {present.source_volume_id}",
                hint="choose another name, or delete it first",
            )
        self.provisioning.check_snapshot(image_of(present))
        return present

    def plan(
        self, volume_id: volumes.VolumeId, snapshot_id: str, name: str, *, group_id: str = ""
    ) -> SnapshotRecord:
        """The record of a snapshot that is to be taken of a volume, with what is known of its bytes now.

        Raises `models.VolumeNotFound`, `models.RecordMissing`, `ImageMissing`,
        `ForeignImage`.
        """
        self.volume_records.load(volume_id)
        self.provisioning.check_image(volume_id)
        record, known = self.volume_records.load(volume_id), self.content_records.load(volume_id)
        return SnapshotRecord(
            snapshot_id=snapshot_id,
            name=name,
            phase="creating",
            source_volume_id=record.volume_id,
            size_bytes=record.capacity_bytes,
            created_ns=0,
            **{name: getattr(known, name) for name in _OF_CONTENT},
            group_id=group_id,
        )

    async def take(self, plans: Sequence[SnapshotRecord]) -> tuple[SnapshotRecord, ...]:
        """Take a point-in-time snapshot of all of `plans`, or none. Raises what `create` does, and
        GroupNeverIdle.
        """
        try:
            async with workers.long_work():  # before anything is frozen
                moving = await workers.run(self._begin, plans)
                async with self.guest_freezer.frozen(moving.in_guests):
                    moment_ns = await workers.run(self._copy, plans, moving)
            return await workers.run(self._settle, plans, moment_ns)
        # Whatever it was, a bug too: records in phase "creating" must not stay. Not a cancellation, which comes only
        # when the loop ends: the thread may still be copying then, and the next start discards what it leaves.
        except Exception:
            for each in plans:
                await workers.run(self._discard_or_log, each.id)
            raise
        finally:
            for each in plans:
                self.capacity.give_back(each.snapshot_id)

    def _begin(self, plans: Sequence[SnapshotRecord]) -> QuiescePlan:
        sources = [volumes.VolumeId(each.source_volume_id) for each in plans]
        moving = quiesce.check(self.node, sources, at_once=self.provisioning.copies_at_once())
        for each in plans:
            source = volumes.VolumeId(each.source_volume_id)
            self.capacity.set_aside(each.snapshot_id, self.provisioning.copy_bytes(source))
            self.snapshot_records.save(each)
        return moving

    def _copy(self, plans: Sequence[SnapshotRecord], moving: QuiescePlan) -> int:
        """Copy all while the mounted ones are frozen; returns the point in time."""
        moment_ns = self._copy_frozen(plans, moving)
        for plan in plans:  # after the copy: a node that is given a volume is on record before
            self._check_as_planned(plan)
        return moment_ns

    def _check_as_planned(self, plan: SnapshotRecord) -> None:
        known = self.content_records.load(volumes.VolumeId(plan.source_volume_id))
        if any(getattr(known, name) != getattr(plan, name) for name in _OF_CONTENT):
            raise ContentChanged(plan.source_volume_id)

    def _copy_frozen(self, plans: Sequence[SnapshotRecord], moving: QuiescePlan) -> int:
        everywhere = self.provisioning.is_used_elsewhere
        unheld = [plan for plan in plans if everywhere or plan.source_volume_id in moving.raw]
        with self.freezer.frozen(moving.here):
            for plan in plans:
                if plan not in unheld:
                    self.provisioning.take_snapshot(image_of(plan))
            return self._copy_unheld([image_of(plan) for plan in unheld])

    def _copy_unheld(self, images: Sequence[Image]) -> int:
        """Copy, last, what cannot be frozen: consistent if none but the last was written to since its copy."""
        for _ in range(_ROUNDS):
            for each in images:
                moment_ns = time.time_ns()
                self.provisioning.take_snapshot(each)
            if not any(self.provisioning.moved_on(each) for each in images[:-1]):
                return moment_ns if images else time.time_ns()
        raise errors.OperationPending.named(
            "GroupNeverIdle",
            f"{', '.join([image.volume_id for image in images])} are not copied",
            why=f"in {_ROUNDS} rounds one of them was written to before the last was copied",
            hint="retry; freeze their filesystems, pause their users, or unpublish them",
        )

    def _settle(
        self, plans: Sequence[SnapshotRecord], moment_ns: int
    ) -> tuple[SnapshotRecord, ...]:
        ready = {"phase": "ready", "created_ns": moment_ns}
        return tuple(self.snapshot_records.save(each.but(**ready)) for each in plans)

    def find(self, snapshot_id: str) -> SnapshotRecord:
        """A snapshot that is ready; raises `SnapshotNotFound`."""
        return self.snapshot_records.load(snapshot_id)

    def delete(self, snapshot_id: str) -> None:
        """Delete a snapshot; absent is a success. Raises `IdOfOtherPool`, `SnapshotBelongsToGroup`.

        A member whose group is gone is deleted alone: nothing else could.
        """
        self.pool.ids.check(snapshot_id)
        record = self.snapshot_records.find(snapshot_id)
        if record is None:
            return
        if record.group_id and self.groups.find(record.group_id) is not None:
            raise errors.InvalidRequest.named(
                "SnapshotBelongsToGroup",
                f"{snapshot_id} is not deleted",
                why=f"it belongs to the group snapshot {record.group_id}",
                hint="call DeleteVolumeGroupSnapshot",
            )
        self.discard(record)

    def discard(self, record: SnapshotRecord) -> None:
        """Delete a snapshot, also a group's member, in an order that survives a crash at any point.

        On a full disk the intent cannot be written; the caller's retry then continues. Raises
        `pool_store.RecordChanged` if somebody else has written the record since: it is theirs.
        """
        record = begin_discard(self.snapshot_records, record)
        self.provisioning.delete_snapshot(image_of(record))
        self.snapshot_records.remove(record.id, previous=record.stored)

    def discard_unfinished(self, snapshot_id: str) -> None:
        """Discard a snapshot that is not ready; any other stays."""
        record = self.snapshot_records.find(snapshot_id)
        if record is not None and record.phase != "ready":
            self.discard(record)

    def _discard_or_log(self, snapshot_id: str) -> None:
        """What fails is left to the garbage collector, and does not hide the caller's error."""
        try:
            self.discard_unfinished(snapshot_id)
        except errors.CrustError as err:
            extra = {"snapshot_id": snapshot_id, "error": err}
            _log.warning("an incomplete snapshot stays for now", extra=extra)

    def recover(self) -> None:
        """Discard incomplete snapshots, and finish interrupted deletions."""
        for record in self.snapshot_records.unfinished():
            self._discard_or_log(record.id)


def begin_discard(records: Records[SetRecord], record: SetRecord) -> SetRecord:
    """Note in place of `record` that it is being deleted; on a full disk it may stay as it is. Returns what stands.

    Raises `pool_store.RecordChanged` if somebody else has written it since.
    """
    try:
        return records.save(record.but(phase="deleting"))
    except errors.Exhausted:
        return records.find(record.id) or record  # a write that failed may be there


def image_of(record: SnapshotRecord) -> Image:
    """The snapshot in the engine's terms."""
    return Image(record.snapshot_id, volumes.VolumeId(record.source_volume_id), record.size_bytes)
