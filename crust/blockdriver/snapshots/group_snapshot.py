"""Group snapshots: a point-in-time copy of several volumes, which preserves the order of writes across them.

The members of a group are taken and deleted together; each can be restored alone. The group's record is written
before its members' records, and removed after them.
"""

import logging
from collections.abc import Sequence

from crust.blockdriver.records.models import GroupRecord, SnapshotRecord
from crust.blockdriver.records.pool import Pool
from crust.blockdriver.records.records import Records
from crust.blockdriver.snapshots.take_snapshot import VolumeSnapshots, begin_discard, image_of
from crust.core import errors, volumes
from crust.core.pool_ids import PoolIds
from crust.host.process import workers

_log = logging.getLogger(__name__)


class GroupSnapshots:
    """Takes, deletes and finds group snapshots. Methods that are not async block; see `VolumeSnapshots`."""

    def __init__(
        self,
        pool: Pool,
        groups: Records[GroupRecord],
        volume_snapshots: VolumeSnapshots,
    ) -> None:
        self.pool = pool
        self._groups = groups
        self._volume_snapshots = volume_snapshots

    async def create(
        self, name: str, volume_ids: Sequence[volumes.VolumeId]
    ) -> tuple[GroupRecord, tuple[SnapshotRecord, ...]]:
        """Take the group; taken already is a success. Raises `GroupNameTaken`, and as `VolumeSnapshots.create`."""
        ids = sorted(volume_ids)
        group = await workers.run(self._present_or_plan, name, ids)
        if group.phase == "ready":
            return group, await workers.run(self._present_members, group)
        return await self._take(group)

    def _present_or_plan(self, name: str, ids: list[volumes.VolumeId]) -> GroupRecord:
        present = self._groups.find(self.pool.ids.group_id(name))
        if present is not None and present.phase != "ready":  # it was never answered
            self._discard(present)
            present = None
        if present is None:
            return plan(self.pool.ids, name, ids)
        if [volume_id for volume_id, _ in present.members] != ids:
            raise errors.Conflict.named(
                "GroupNameTaken",
                f"the group snapshot {name!r} exists already",
                why="it is a group of other volumes",
                hint="choose another name, or delete it first",
            )
        return present

    async def _take(self, group: GroupRecord) -> tuple[GroupRecord, tuple[SnapshotRecord, ...]]:
        plans = await workers.run(self._begin, group)
        try:
            taken = await self._volume_snapshots.take(plans)
            ready = {"phase": "ready", "created_ns": taken[0].created_ns}
            return await workers.run(self._groups.save, group.but(**ready)), taken
        # as in `VolumeSnapshots.take`: any error, a bug too, but no cancellation
        except Exception:
            await workers.run(self._discard_or_log, group.id)
            raise

    def _begin(self, group: GroupRecord) -> list[SnapshotRecord]:
        plans = [
            self._volume_snapshots.plan(
                volumes.VolumeId(volume_id), member_id, "", group_id=group.id
            )
            for volume_id, member_id in group.members
        ]
        self._groups.save(group)
        return plans

    def get(
        self, group_id: str, snapshot_ids: Sequence[str]
    ) -> tuple[GroupRecord, tuple[SnapshotRecord, ...]]:
        """A group that is ready. Raises `GroupNotFound`, `GroupMembersDiffer`."""
        group = self._groups.load(group_id)
        _check_members(group, snapshot_ids)
        return group, self._members(group)

    def delete(self, group_id: str, snapshot_ids: Sequence[str]) -> None:
        """Delete a group and its members; absent is a success. Raises `IdOfOtherPool`, `GroupMembersDiffer`."""
        self.pool.ids.check(group_id)
        group = self._groups.find(group_id)
        if group is not None:
            _check_members(group, snapshot_ids)
            self._discard(group)

    def recover(self) -> None:
        """Finish interrupted deletions and discard incomplete groups."""
        for group in self._groups.unfinished():
            self._discard_or_log(group.id)

    def discard_unfinished(self, group_id: str) -> None:
        """Discard a group that is not ready, with its members; any other stays."""
        group = self._groups.find(group_id)
        if group is not None and group.phase != "ready":
            self._discard(group)

    def member_ids(self, group_id: str) -> tuple[str, ...]:
        """The ids of a group's snapshots; none when there is no such group."""
        group = self._groups.find(group_id)
        return () if group is None else tuple(snapshot_id for _, snapshot_id in group.members)

    def _discard_or_log(self, group_id: str) -> None:
        try:
            self.discard_unfinished(group_id)
        except errors.CrustError as err:
            extra = {"group_id": group_id, "error": err}
            _log.warning("an incomplete group snapshot stays for now", extra=extra)

    def _discard(self, group: GroupRecord) -> None:
        """See `VolumeSnapshots.discard`."""
        group = begin_discard(self._groups, group)
        for _, snapshot_id in group.members:
            member = self._volume_snapshots.snapshot_records.find(snapshot_id)
            if member is not None:
                self._volume_snapshots.discard(member)
        self._groups.remove(group.id, previous=group.stored)

    def _present_members(self, group: GroupRecord) -> tuple[SnapshotRecord, ...]:
        """Raises `SnapshotMissing` if one of them is gone."""
        members = self._members(group)
        for each in members:
            self._volume_snapshots.provisioning.check_snapshot(image_of(each))
        return members

    def _members(self, group: GroupRecord) -> tuple[SnapshotRecord, ...]:
        return tuple(self._volume_snapshots.find(snapshot_id) for _, snapshot_id in group.members)


def plan(pool_ids: PoolIds, name: str, ids: Sequence[volumes.VolumeId]) -> GroupRecord:
    """The record of a group to be taken."""
    return GroupRecord(
        group_id=pool_ids.group_id(name),
        name=name,
        phase="creating",
        created_ns=0,
        members=tuple((each, pool_ids.member_id(name, each)) for each in ids),
    )


def _check_members(group: GroupRecord, snapshot_ids: Sequence[str]) -> None:
    if sorted(snapshot_ids) != sorted(snapshot_id for _, snapshot_id in group.members):
        raise errors.InvalidRequest.named(
            "GroupMembersDiffer",
            f"snapshot_ids are not those of {group.id}",
            why="they must be all of the group's snapshots and no others",
            hint="use the snapshot ids that CreateVolumeGroupSnapshot returned",
        )
