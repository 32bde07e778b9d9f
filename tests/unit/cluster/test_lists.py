"""Lists and capacity of many nodes: each volume once, and no list that a CO would take as complete and is not."""

import dataclasses
from typing import Any

import grpc
import grpc.aio
import pytest

from crust import errors
from crust.cluster.central import listing
from crust.wire.csi.v1 import csi_pb2
from tests.support.cluster.central_cluster import (
    NODES,
    SimulatedCluster,
    refused,
)
from tests.support.cluster.cluster_contract import eventually
from tests.support.cluster.memory_cluster import MemoryController
from tests.support.cluster.simulated_pools import GIB, KEY

Code = grpc.StatusCode


@pytest.mark.parametrize("page", [0, 1, 2, 3, 5, 100])
async def test_list_has_each_volume_once_at_any_size_of_page(
    cluster: SimulatedCluster, page: int
) -> None:
    sidecar = await cluster.controller()
    made = {(await sidecar.create(f"pvc-{n}")).volume_id for n in range(10)}
    entries = await sidecar.listed(page)
    assert [each.volume.volume_id for each in entries] == sorted(made)


async def test_list_names_volumes_of_an_absent_node_and_says_that_it_is_away(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    made = {node: (await sidecar.create(f"pvc-{node}", node)).volume_id for node in NODES}
    cluster.store.cut("n2")
    for page in (0, 1, 2):
        entries = await sidecar.listed(page)
        assert [each.volume.volume_id for each in entries] == sorted(made.values())
    absent = next(each for each in entries if each.volume.volume_id == made["n2"])
    assert absent.status.volume_condition.abnormal
    assert "n2" in absent.status.volume_condition.message
    assert list(absent.status.published_node_ids) == ["n2"]


@pytest.mark.parametrize("what", ["pool unmounted", "announced twice", "hangs"])
async def test_list_names_volumes_of_a_node_that_does_not_serve_its_pool(
    cluster: SimulatedCluster, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    made = {node: (await sidecar.create(f"pvc-{node}", node)).volume_id for node in NODES}
    n2 = cluster.pools["n2"]
    if what == "hangs":
        monkeypatch.setattr(listing, "NODE_S", 2.0)  # the others answer in that time
    if what == "announced twice":
        said = cluster.store.kept.announcements["n2"]
        cluster.store.kept.announcements["n9"] = dataclasses.replace(said, node_id="n9")
    else:
        n2.list_error = None if what == "hangs" else errors.PeerUnavailable("it is not mounted")
        n2.list_gate.clear()
    entries = await sidecar.listed()
    assert [each.volume.volume_id for each in entries] == sorted(made.values())
    away = [each for each in entries if each.status.volume_condition.abnormal]
    assert [each.volume.volume_id for each in away] == [made["n2"]]
    assert list(away[0].status.published_node_ids) == ["n2"]


async def test_list_with_nodes_away_reads_the_records_once(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    for node in NODES:
        await sidecar.create(f"pvc-{node}", node)
        cluster.store.cut(node)
    read, reads = MemoryController.placements, []

    async def counted(self: MemoryController, *given: Any) -> Any:
        reads.append(given)
        return await read(self, *given)

    monkeypatch.setattr(MemoryController, "placements", counted)
    assert len(await sidecar.listed()) == 3
    assert len(reads) == 1


async def test_list_is_unavailable_without_the_store(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    await sidecar.create("pvc")
    cluster.store._cut.add("controller")  # still the leader, as far as it knows
    async with refused(Code.UNAVAILABLE):
        await sidecar.listed()


async def test_list_refuses_a_bad_token_and_a_negative_count(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    async with refused(Code.ABORTED):
        await sidecar.controller.ListVolumes(csi_pb2.ListVolumesRequest(starting_token="mine"))
    async with refused(Code.INVALID_ARGUMENT):
        await sidecar.controller.ListVolumes(csi_pb2.ListVolumesRequest(max_entries=-1))


async def test_list_is_unavailable_while_a_node_is_away_whose_records_may_be_incomplete(
    cluster: SimulatedCluster,
) -> None:
    n2 = cluster.pools["n2"]
    n2.list_gate.clear()  # its survey does not end
    sidecar = await cluster.controller()
    made = await sidecar.create("pvc", "n1")
    await n2.CreateVolume(csi_pb2.CreateVolumeRequest(name="never-recorded"), None)
    cluster.store.cut("n2")
    for ask, asked in (
        (sidecar.controller.ListVolumes, csi_pb2.ListVolumesRequest()),
        (sidecar.controller.ListSnapshots, csi_pb2.ListSnapshotsRequest()),
    ):
        async with refused(Code.UNAVAILABLE) as found:
            await ask(asked)
        assert "NodeAbsent" in (found[0].details() or "")
    n2.list_gate.set()
    cluster.store.heal("n2")
    await cluster.surveyed()
    cluster.store.cut("n2")
    listed = [each.volume.volume_id for each in await sidecar.listed()]
    assert listed == sorted([made.volume_id, n2.ids.volume_id("never-recorded")])


async def test_snapshots_are_listed_while_a_node_is_away_that_has_none(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    volume, grouped = await sidecar.create("a", "n1"), await sidecar.create("b", "n2")
    request = csi_pb2.CreateSnapshotRequest(name="s", source_volume_id=volume.volume_id)
    made = (await sidecar.controller.CreateSnapshot(request)).snapshot
    cluster.store.cut("n2")
    ask, everything = sidecar.controller.ListSnapshots, csi_pb2.ListSnapshotsRequest()
    assert [each.snapshot.snapshot_id for each in (await ask(everything)).entries] == [
        made.snapshot_id
    ]
    cluster.store.heal("n2")
    await eventually(lambda: "n2" in cluster.store.kept.announcements)
    group = csi_pb2.CreateVolumeGroupSnapshotRequest(
        name="g", source_volume_ids=[grouped.volume_id]
    )
    await sidecar.groups.CreateVolumeGroupSnapshot(group)
    cluster.store.cut("n2")
    async with refused(Code.UNAVAILABLE):  # the group is recorded, and its members are not
        await ask(everything)


async def test_snapshots_are_routed_listed_and_unavailable_while_a_node_is_away(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    ids = {}
    for node in NODES:
        volume = await sidecar.create(f"pvc-{node}", node)
        request = csi_pb2.CreateSnapshotRequest(name=f"s-{node}", source_volume_id=volume.volume_id)
        ids[node] = (await sidecar.controller.CreateSnapshot(request)).snapshot.snapshot_id
    everything = await sidecar.controller.ListSnapshots(csi_pb2.ListSnapshotsRequest())
    assert [e.snapshot.snapshot_id for e in everything.entries] == sorted(ids.values())
    cluster.store.cut("n3")
    async with refused(Code.UNAVAILABLE):
        await sidecar.controller.ListSnapshots(csi_pb2.ListSnapshotsRequest())
    one = csi_pb2.ListSnapshotsRequest(snapshot_id=ids["n1"])
    assert len((await sidecar.controller.ListSnapshots(one)).entries) == 1
    none = csi_pb2.ListSnapshotsRequest(snapshot_id="nothing")
    assert len((await sidecar.controller.ListSnapshots(none)).entries) == 0
    delete = csi_pb2.DeleteSnapshotRequest(snapshot_id=ids["n1"])
    await sidecar.controller.DeleteSnapshot(delete)
    assert f"snapshot-{ids['n1'].rpartition('-')[2]}" not in cluster.placements()


async def test_capacity_of_a_segment_is_its_nodes_and_of_all_the_sum(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await sidecar.create("pvc", "n1", size=40 * GIB)
    await eventually(lambda: cluster.store.kept.announcements["n1"].capacity_bytes == 60 * GIB)
    at = csi_pb2.GetCapacityRequest()
    at.accessible_topology.segments[KEY] = "n1"
    one = await sidecar.controller.GetCapacity(at)
    assert (one.available_capacity, one.maximum_volume_size.value) == (60 * GIB, 60 * GIB)
    everything = await sidecar.controller.GetCapacity(csi_pb2.GetCapacityRequest())
    assert everything.available_capacity == 260 * GIB
    assert everything.maximum_volume_size.value == 100 * GIB
    cluster.store.cut("n1")
    assert (await sidecar.controller.GetCapacity(at)).available_capacity == 0
    async with refused(Code.INVALID_ARGUMENT):
        bad = csi_pb2.GetCapacityRequest(parameters={"unknown": "1"})
        await sidecar.controller.GetCapacity(bad)
