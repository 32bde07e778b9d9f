"""Surveys of pools while something is made there, and records of names that stand nowhere."""

import asyncio

import grpc
import pytest

from crust import pool_ids
from crust.cluster.central import survey
from crust.wire.csi.v1 import csi_pb2
from tests.support.cluster.central_cluster import (
    NODES,
    Sidecar,
    SimulatedCluster,
    all_of,
    leading,
    refused,
)
from tests.support.cluster.cluster_contract import eventually

Code = grpc.StatusCode


async def test_volume_that_is_being_created_during_the_survey_is_not_made_again_elsewhere(
    cluster: SimulatedCluster,
) -> None:
    """The store loses the record while a node creates, and the survey ends before the volume is there."""
    n1 = cluster.pools["n1"]
    async with leading(cluster.store.controller("c1")) as first:
        await cluster.surveyed()
        n1.gate.clear()
        creating = asyncio.create_task(first.create("pvc", "n1"))
        await n1.arrived.wait()
        cluster.store.wipe()
        await all_of([creating])
    await eventually(lambda: set(cluster.store.kept.announcements) == set(NODES))
    async with leading(cluster.store.controller("c2")) as second:
        await cluster.surveyed()
        n1.gate.set()
        volume = await second.create("pvc", "n2")  # whatever is asked for now
    assert volume.volume_id == n1.ids.volume_id("pvc")
    assert cluster.homes("pvc") == ["n1"]


async def test_deletion_that_waits_at_a_node_makes_no_record(cluster: SimulatedCluster) -> None:
    n1 = cluster.pools["n1"]
    async with leading(cluster.store.controller("c1")) as first:
        volume = await first.create("pvc", "n1")
        n1.gate.clear()
        n1.arrived.clear()
        deleting = asyncio.create_task(first.delete(volume.volume_id))
        await n1.arrived.wait()
        del n1.volumes[volume.volume_id]
        cluster.store.wipe()
        await all_of([deleting])
    await eventually(lambda: set(cluster.store.kept.announcements) == set(NODES))
    async with leading(cluster.store.controller("c2")):
        await cluster.surveyed()
        assert cluster.placements() == {}
        n1.gate.set()


async def test_survey_records_the_group_of_a_member_and_not_the_member(
    cluster: SimulatedCluster,
) -> None:
    async with leading(cluster.store.controller("c1")) as first:
        group = await _group(first, "g")
    cluster.store.wipe()
    await eventually(lambda: set(cluster.store.kept.announcements) == set(NODES))
    async with leading(cluster.store.controller("c2")) as second:
        await cluster.surveyed()
        kinds = sorted(key.partition("-")[0] for key in cluster.placements())
        assert kinds == ["group", "volume", "volume"]
        other = await second.create("c", "n2")
        request = csi_pb2.CreateVolumeGroupSnapshotRequest(
            name="g", source_volume_ids=[other.volume_id]
        )
        async with refused(Code.ALREADY_EXISTS):
            await second.groups.CreateVolumeGroupSnapshot(request)
        await _delete(second, group)
        assert {key.partition("-")[0] for key in cluster.placements()} == {"volume"}


async def test_records_of_members_go_with_their_group(cluster: SimulatedCluster) -> None:
    """As a survey of an earlier version has made them."""
    async with leading(cluster.store.controller("c")) as sidecar:
        await cluster.surveyed()
        group = await _group(sidecar, "g")
        pool_id = cluster.pools["n1"].pool_id()
        for each in group.snapshots:
            cluster.store.kept.placements[pool_ids.key_of(each.snapshot_id)] = pool_id
        await _delete(sidecar, group)
        assert {key.partition("-")[0] for key in cluster.placements()} == {"volume"}


async def test_record_of_a_snapshot_that_a_deletion_names_as_a_member_and_that_stands_stays(
    cluster: SimulatedCluster,
) -> None:
    async with leading(cluster.store.controller("c")) as sidecar:
        await cluster.surveyed()
        volume = await sidecar.create("a", "n1")
        asked = csi_pb2.CreateSnapshotRequest(name="s", source_volume_id=volume.volume_id)
        made = (await sidecar.controller.CreateSnapshot(asked)).snapshot
        request = csi_pb2.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=cluster.pools["n1"].ids.group_id("none"),
            snapshot_ids=[made.snapshot_id],
        )
        await sidecar.groups.DeleteVolumeGroupSnapshot(request)
        assert pool_ids.key_of(made.snapshot_id) in cluster.placements()


async def test_records_of_snapshots_and_groups_that_stand_nowhere_are_collected(
    cluster: SimulatedCluster,
) -> None:
    """What an earlier version, or a controller that died between a deletion and its record, has left."""
    placements = cluster.store.kept.placements
    n1 = cluster.pools["n1"]
    async with leading(cluster.store.controller("c1")) as first:
        await cluster.surveyed()
        group = await _group(first, "g")
    kept = dict(cluster.placements())
    stale = {
        pool_ids.key_of(n1.ids.member_id("gone", "volume")): n1.pool_id(),
        pool_ids.name_key("snapshot", "gone"): n1.pool_id(),
        pool_ids.name_key("group", "gone"): n1.pool_id(),
    }
    absent = {pool_ids.name_key("snapshot", "away"): cluster.pools["n3"].pool_id()}
    placements.update(stale | absent)
    cluster.store.cut("n3")
    async with leading(cluster.store.controller("c2")):
        await eventually(lambda: not set(stale) & set(placements))
        assert cluster.placements() == kept | absent
        cluster.store.heal("n3")
        await eventually(lambda: not set(absent) & set(placements))
    assert cluster.placements() == kept
    assert pool_ids.key_of(group.group_snapshot_id) in kept


async def test_record_of_a_snapshot_that_is_being_taken_is_not_collected(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "COLLECT_EVERY_S", 0.0)  # at each round
    monkeypatch.setattr(survey, "SURVEY_EVERY_S", 0.01)
    n1 = cluster.pools["n1"]
    async with leading(cluster.store.controller("c")) as sidecar:
        await cluster.surveyed()
        volume = await sidecar.create("a", "n1")
        n1.gate.clear()
        n1.arrived.clear()
        asked = csi_pb2.CreateSnapshotRequest(name="s", source_volume_id=volume.volume_id)
        taking = asyncio.ensure_future(sidecar.controller.CreateSnapshot(asked))
        await n1.arrived.wait()
        lists = n1.lists
        await eventually(lambda: n1.lists > lists + 3)
        assert pool_ids.name_key("snapshot", "s") in cluster.placements()
        n1.gate.set()
        await taking
        assert pool_ids.name_key("snapshot", "s") in cluster.placements()


async def _group(sidecar: Sidecar, name: str) -> csi_pb2.VolumeGroupSnapshot:
    """A group of two volumes at n1."""
    volumes = [await sidecar.create(each, "n1") for each in ("a", "b")]
    request = csi_pb2.CreateVolumeGroupSnapshotRequest(
        name=name, source_volume_ids=[each.volume_id for each in volumes]
    )
    made = await sidecar.groups.CreateVolumeGroupSnapshot(request)
    group: csi_pb2.VolumeGroupSnapshot = made.group_snapshot
    return group


async def _delete(sidecar: Sidecar, group: csi_pb2.VolumeGroupSnapshot) -> None:
    request = csi_pb2.DeleteVolumeGroupSnapshotRequest(
        group_snapshot_id=group.group_snapshot_id,
        snapshot_ids=[each.snapshot_id for each in group.snapshots],
    )
    await sidecar.groups.DeleteVolumeGroupSnapshot(request)


async def test_node_that_hangs_does_not_keep_the_others_from_being_surveyed(
    cluster: SimulatedCluster,
) -> None:
    cluster.pools["n1"].list_gate.clear()
    async with leading(cluster.store.controller("c")):
        others = {f"surveyed-{cluster.pools[each].pool_id()}" for each in ("n2", "n3")}
        await eventually(lambda: others <= set(cluster.store.kept.placements))
        cluster.pools["n1"].list_gate.set()
        await cluster.surveyed()
