"""CreateSnapshot, CreateVolumeGroupSnapshot, and their deletion: sets of snapshots.

A single snapshot is a set of one. The snapshots of a group are taken, answered and deleted together; each can be
restored alone. The order is: freeze all mounted filesystems, first in guests, then on this host; copy the images
aside; thaw; commit them with their record in one step of the engine. The commit comes after the last thaw, because
only then a guest says whether it was frozen. A failure or a crash leaves nothing: the CO's retry takes the set again.
The id is derived from the name, so a retry finds a finished set.

The driver does not use the copy of a volume whose content record has changed since the plan, because a node got the
volume: the snapshot would say that nobody ever wrote it, and a volume made from it would be formatted.

The writers of raw devices cannot be stopped, and writers on other nodes are not known. In a group the driver copies
one such volume while the others are frozen. It copies several one after the other and then checks them: if only the
last was written to since its copy, all copies are of the moment of the last copy. Otherwise it copies them again, a
few times; then it refuses the group (GroupNeverIdle).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.engines.pool_access import RecordKind, set_of
from crust.blockdriver.engines.protocol import Image, NewSnapshotSet
from crust.blockdriver.records.models import Snapshot, SnapshotSet
from crust.blockdriver.records.records import UNREADABLE
from crust.blockdriver.records.stores import Stores
from crust.blockdriver.snapshots import freezer
from crust.blockdriver.snapshots.freezer import Freezer, QuiescePlan
from crust.core import errors, volumes
from crust.host.process import workers

_ROUNDS = 8
_CONTENT_FIELDS = ("state", "fs_type", "planned_uuid", "filled_bytes", "in_guest", "format_in")
"""The fields that a snapshot takes over from its volume's content record."""


class ContentChanged(errors.OperationPending):
    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"the copy of {volume_id} is not used",
            why="the volume was given to a node, or formatted, while it was copied",
        )


@dataclass(frozen=True, slots=True)
class SnapshotSets:
    """Takes, finds and deletes snapshots and groups. The caller locks volumes and set. Plain methods block."""

    stores: Stores
    freezer: Freezer
    most_per_volume: int

    async def create(self, name: str, volume_id: volumes.VolumeId) -> SnapshotSet:
        """Take a snapshot; an existing one is a success. A lost one is not taken again: its name means that moment.

        Raises SnapshotNameTaken, SnapshotLimitReached, `models.VolumeNotFound`, `ContentChanged`, `ImageMissing`,
        `ForeignImage`, `SnapshotMissing`, `Exhausted`, and the errors of `freezer.plan` and `Freezer.frozen`.
        """
        set_id = self.stores.pool.ids.snapshot_id(name)
        return await self._create(set_id, name, {volume_id: set_id})

    async def create_group(self, name: str, volume_ids: Sequence[volumes.VolumeId]) -> SnapshotSet:
        """Take a group, as `create`; raises GroupNameTaken and GroupNeverIdle too."""
        ids = self.stores.pool.ids
        member_ids = {volume_id: ids.member_id(name, volume_id) for volume_id in sorted(volume_ids)}
        return await self._create(ids.group_id(name), name, member_ids)

    async def _create(
        self, set_id: str, name: str, member_ids: Mapping[volumes.VolumeId, str]
    ) -> SnapshotSet:
        plan = await workers.run(self._present_or_plan, set_id, name, member_ids)
        if plan.stored is not None:
            return plan
        async with workers.long_work(workers.LongWork.COPY):  # before anything is frozen
            sources = [snapshot.source_volume_id for snapshot in plan.snapshots]
            quiesce = await workers.run(freezer.plan, self.stores, sources)
            async with workers.entered(self._taking(plan)) as taking:
                async with self.freezer.frozen(quiesce.members):
                    moment_ns = await workers.run(self._copy, taking, plan, quiesce)
                return await workers.run(
                    self.stores.snapshot_sets.make,
                    plan.replaced(created_ns=moment_ns),
                    lambda data: taking.commit({RecordKind.SNAPSHOTS: data}),
                )

    def _present_or_plan(
        self, set_id: str, name: str, member_ids: Mapping[volumes.VolumeId, str]
    ) -> SnapshotSet:
        present = self.stores.snapshot_sets.find(set_id)
        if present is not None:
            first, hint = present.snapshots[0], "choose another name, or delete it first"
            is_same = [one.source_volume_id for one in present.snapshots] == list(member_ids)
            if not is_same and set_of(first.snapshot_id) != first.snapshot_id:
                raise errors.Conflict.named(
                    "GroupNameTaken",
                    f"the group snapshot {present.name!r} exists already",
                    why="it is a group of other volumes",
                    hint=hint,
                )
            if not is_same:
                raise errors.Conflict.named(
                    "SnapshotNameTaken",
                    f"the snapshot {present.name!r} exists already",
                    why=f"it is a snapshot of {first.source_volume_id}",
                    hint=hint,
                )
            for image in images_of(present):
                self.stores.provisioning.check_snapshot(image)
            return present
        planned = []
        for volume_id, snapshot_id in member_ids.items():
            record = self.stores.volume_records.load(volume_id)
            number = self.stores.snapshot_sets.index.snapshots_of(volume_id)
            if number >= self.most_per_volume:
                raise errors.Exhausted.named(
                    "SnapshotLimitReached",
                    f"no snapshot of {volume_id} is taken",
                    why=f"it has {number}, and max_snapshots_per_volume is {self.most_per_volume}",
                )
            self.stores.provisioning.check_image(volume_id)
            content = self.stores.content_records.load(volume_id)
            snapshot = Snapshot(
                snapshot_id=snapshot_id,
                source_volume_id=volume_id,
                size_bytes=record.capacity_bytes,
                **{name: getattr(content, name) for name in _CONTENT_FIELDS},
            )
            planned.append(snapshot)
        return SnapshotSet(set_id=set_id, name=name, created_ns=0, snapshots=tuple(planned))

    @contextmanager
    def _taking(self, plan: SnapshotSet) -> Iterator[NewSnapshotSet]:
        images = images_of(plan)
        with (
            self.stores.capacity.set_aside(plan.set_id, [image.volume_id for image in images]),
            self.stores.provisioning.taking(plan.set_id, images) as taking,
        ):
            yield taking

    def _copy(self, taking: NewSnapshotSet, plan: SnapshotSet, quiesce: QuiescePlan) -> int:
        everywhere = self.stores.provisioning.is_used_elsewhere
        images = images_of(plan)
        unheld = [image for image in images if everywhere or image.volume_id in quiesce.raw]
        for image in images:
            if image not in unheld:
                taking.take(image)
        moment_ns = time.time_ns()
        for _ in range(_ROUNDS):  # consistent if only the last was written to since its copy
            for image in unheld:
                moment_ns = time.time_ns()
                taking.take(image)
            if not any(taking.moved_on(image) for image in unheld[:-1]):
                break
        else:
            raise errors.OperationPending.named(
                "GroupNeverIdle",
                f"{', '.join([image.volume_id for image in unheld])} are not copied",
                why=f"in {_ROUNDS} rounds one of them was written to before the last was copied",
            )
        for snapshot in plan.snapshots:  # after the copy: a record names a node before it gets one
            content = self.stores.content_records.load(snapshot.source_volume_id)
            if any(getattr(content, name) != getattr(snapshot, name) for name in _CONTENT_FIELDS):
                raise ContentChanged(snapshot.source_volume_id)
        sources = [image.volume_id for image in images]
        self.stores.capacity.check_taken(plan.set_id, sources, taking.added_bytes())
        return moment_ns

    def find(self, snapshot_id: str) -> tuple[SnapshotSet, Snapshot]:
        """A snapshot and its set; raises SnapshotNotFound."""
        for member in self._members(set_of(snapshot_id)):
            if member[1].snapshot_id == snapshot_id:
                return member
        raise errors.NotFound.named("SnapshotNotFound", f"there is no snapshot {snapshot_id!r}")

    def _members(self, set_id: str) -> list[tuple[SnapshotSet, Snapshot]]:
        kept = self.stores.snapshot_sets.find(set_id)
        return [(kept, snapshot) for snapshot in kept.snapshots] if kept else []

    def page(self, source_volume_id: str, after: str) -> Iterator[tuple[SnapshotSet, Snapshot]]:
        """The snapshots with ids after `after`, of one volume or of all, by set and id.

        Each set is read when the list reaches it. A set with an unreadable record is left out: the pool's health
        reports it.
        """
        first = set_of(after)
        for set_id in (first, *self.stores.snapshot_sets.index.page(first)):
            summary = self.stores.snapshot_sets.index.get(set_id)
            sources = (source for _, source in summary.snapshots) if summary else ()
            if summary and source_volume_id not in ("", *sources):
                continue
            try:
                members = self._members(set_id)
            except UNREADABLE:
                continue
            for kept, snapshot in sorted(members, key=lambda pair: pair[1].snapshot_id):
                is_after = set_id != first or snapshot.snapshot_id > after
                if is_after and source_volume_id in ("", snapshot.source_volume_id):
                    yield kept, snapshot

    def delete(self, snapshot_id: str) -> None:
        """Delete a snapshot; absent is a success. Raises IdOfOtherPool, SnapshotBelongsToGroup."""
        self.stores.pool.ids.check_own_pool(snapshot_id)
        group_id = set_of(snapshot_id)
        if group_id == snapshot_id:
            if self.stores.pool.ids.is_snapshot_id(snapshot_id):
                self._remove(snapshot_id, self.stores.snapshot_sets.find(snapshot_id))
        elif self.stores.snapshot_sets.find(group_id) is not None:
            raise errors.InvalidRequest.named(
                "SnapshotBelongsToGroup",
                f"{snapshot_id} is not deleted",
                why=f"it belongs to the group snapshot {group_id}",
            )

    def find_group(self, group_id: str, snapshot_ids: Sequence[str]) -> SnapshotSet | None:
        """The group, or None. Raises GroupMembersDiffer unless it has these snapshots."""
        is_group = self.stores.pool.ids.is_group_id(group_id)
        group = self.stores.snapshot_sets.find(group_id) if is_group else None
        members = [snapshot.snapshot_id for snapshot in group.snapshots] if group else []
        if group is not None and sorted(snapshot_ids) != sorted(members):
            raise errors.InvalidRequest.named(
                "GroupMembersDiffer",
                f"snapshot_ids are not those of {group_id}",
                why="they must be all of the group's snapshots and no others",
            )
        return group

    def get_group(self, group_id: str, snapshot_ids: Sequence[str]) -> SnapshotSet:
        """A group with these snapshots. Raises GroupNotFound, GroupMembersDiffer."""
        group = self.find_group(group_id, snapshot_ids)
        if group is None:
            raise errors.NotFound.named("GroupNotFound", f"there is no group snapshot {group_id!r}")
        return group

    def delete_group(self, group_id: str, snapshot_ids: Sequence[str]) -> None:
        """Delete a group with its snapshots; absent is a success. Raises IdOfOtherPool, GroupMembersDiffer."""
        self.stores.pool.ids.check_own_pool(group_id)
        group = self.find_group(group_id, snapshot_ids)
        if self.stores.pool.ids.is_group_id(group_id):
            self._remove(group_id, group)

    def _remove(self, set_id: str, kept: SnapshotSet | None) -> None:
        with self.stores.snapshot_sets.changing(set_id, None):
            self.stores.provisioning.remove_set(set_id, images_of(kept) if kept else ())


def image_of(snapshot: Snapshot) -> Image:
    source = snapshot.source_volume_id
    return Image(snapshot.snapshot_id, source, snapshot.size_bytes)


def images_of(kept: SnapshotSet) -> list[Image]:
    return [image_of(snapshot) for snapshot in kept.snapshots]
