"""Creation by one controller for many nodes: where a volume is made, and that it is made once."""

import grpc
import grpc.aio

from crust.wire.csi.v1 import csi_pb2
from tests.support.cluster.central_cluster import (
    NODES,
    SimulatedCluster,
    all_of,
    refused,
)
from tests.support.cluster.cluster_contract import eventually
from tests.support.cluster.simulated_pools import GIB, KEY

Code = grpc.StatusCode


async def test_volume_is_created_in_the_required_topology(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    for node in NODES:
        volume = await sidecar.create(f"pvc-{node}", node)
        assert volume.accessible_topology[0].segments[KEY] == node
        assert cluster.homes(f"pvc-{node}") == [node]


async def test_64_concurrent_creations_of_8_names_make_8_volumes(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    results = await all_of([sidecar.create(f"pvc-{n % 8}") for n in range(64)])
    assert [each for each in results if isinstance(each, BaseException)] == []
    for number in range(8):
        assert len(cluster.homes(f"pvc-{number}")) == 1


async def test_64_concurrent_creations_spread_and_are_each_made_once(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await all_of([sidecar.create(f"pvc-{n}") for n in range(64)])
    assert sum(len(pool.volumes) for pool in cluster.pools.values()) == 64
    assert all(pool.volumes for pool in cluster.pools.values())


async def test_same_name_with_another_size_is_refused_and_not_made_elsewhere(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await sidecar.create("pvc", size=GIB)
    async with refused(Code.ALREADY_EXISTS):
        await sidecar.create("pvc", size=2 * GIB)
    assert len(cluster.homes("pvc")) == 1


async def test_retry_with_another_topology_does_not_make_a_second_volume(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await sidecar.create("pvc", "n1")
    volume = await sidecar.create("pvc", "n2")
    assert volume.volume_id == cluster.pools["n1"].ids.volume_id("pvc")
    assert cluster.homes("pvc") == ["n1"]


async def test_node_without_capacity_hands_the_name_to_the_next(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    full = cluster.pools["n1"]
    full.said = await full.announcement()
    full.capacity = 0
    for number in range(12):
        await sidecar.create(f"pvc-{number}")
        assert "n1" not in cluster.homes(f"pvc-{number}")
    assert "CreateVolume" in full.calls
    assert len(cluster.placements()) == 12
    assert full.pool_id() not in cluster.placements().values()


async def test_no_capacity_anywhere_is_resource_exhausted_and_leaves_no_record(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    async with refused(Code.RESOURCE_EXHAUSTED) as found:
        await sidecar.create("pvc", size=1000 * GIB)
    assert "3 without the capacity" in (found[0].details() or "")
    assert cluster.placements() == {}


async def test_capacity_that_a_deletion_freed_is_used_before_its_node_announces_it(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    full = cluster.pools["n1"]
    full.most_volumes = 1
    volume = await sidecar.create("pvc-1", "n1")
    full.said = await full.announcement()
    announced = cluster.store.kept.announcements
    await eventually(lambda: announced["n1"] == full.said)
    async with refused(Code.RESOURCE_EXHAUSTED) as found:
        await sidecar.create("pvc-2", "n1")
    assert "1 with the most volumes" in (found[0].details() or "")
    await sidecar.delete(volume.volume_id)
    await sidecar.create("pvc-2", "n1")
    assert cluster.homes("pvc-2") == ["n1"]


async def test_topology_of_an_absent_node_is_resource_exhausted_so_the_pod_moves(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    cluster.store.cut("n1")
    async with refused(Code.RESOURCE_EXHAUSTED):
        await sidecar.create("pvc", "n1")
    assert cluster.placements() == {}
    await sidecar.create("pvc", "n2")
    assert cluster.homes("pvc") == ["n2"]


async def test_no_node_at_all_is_unavailable_and_the_same_call_succeeds_later(
    cluster: SimulatedCluster,
) -> None:
    """RESOURCE_EXHAUSTED would have the pod scheduled again, to nodes that are no better."""
    sidecar = await cluster.controller()
    await cluster.surveyed()
    for node in NODES:
        cluster.store.cut(node)
    async with refused(Code.UNAVAILABLE) as found:
        await sidecar.create("pvc", "n1")
    assert "NoNodeConnected" in (found[0].details() or "")
    assert cluster.placements() == {}
    cluster.store.heal("n1")
    await eventually(lambda: "n1" in cluster.store.kept.announcements)
    await sidecar.create("pvc", "n1")
    assert cluster.homes("pvc") == ["n1"]


async def test_three_nodes_with_less_than_they_announced_are_tried_and_the_last_answer_stays(
    cluster: SimulatedCluster,
) -> None:
    await cluster.join("n4")
    sidecar = await cluster.controller()
    await cluster.surveyed()
    for pool in cluster.pools.values():
        pool.said = await pool.announcement()
        pool.capacity = 0
    async with refused(Code.RESOURCE_EXHAUSTED) as found:
        await sidecar.create("pvc")
    assert "the pool is out of capacity" in (found[0].details() or "")
    assert sum(pool.calls.count("CreateVolume") for pool in cluster.pools.values()) == 3
    assert cluster.placements() == {}


async def test_deleted_volume_frees_its_name(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    volume = await sidecar.create("pvc", "n1")
    assert len(cluster.placements()) == 1
    await sidecar.delete(volume.volume_id)
    assert cluster.placements() == {}
    await sidecar.delete(volume.volume_id)
    await sidecar.create("pvc", "n2")
    assert cluster.homes("pvc") == ["n2"]


async def test_invalid_request_leaves_no_record(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    async with refused(Code.INVALID_ARGUMENT):
        await sidecar.controller.CreateVolume(
            csi_pb2.CreateVolumeRequest(name="pvc", parameters={"unknown": "1"})
        )
    assert cluster.placements() == {}


async def test_out_of_range_leaves_no_record_of_a_new_name_and_keeps_that_of_an_old_one(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    for pool in cluster.pools.values():
        pool.least_bytes = GIB
    async with refused(Code.OUT_OF_RANGE):
        await sidecar.create("pvc", "n1", size=1)
    assert cluster.placements() == {}
    await sidecar.create("pvc", "n1")
    async with refused(Code.OUT_OF_RANGE):
        await sidecar.create("pvc", "n2", size=1)
    assert set(cluster.placements().values()) == {cluster.pools["n1"].pool_id()}
    await sidecar.create("pvc", "n2")
    assert cluster.homes("pvc") == ["n1"]


async def test_invalid_retry_of_a_volume_keeps_its_record(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    await sidecar.create("pvc", "n1")
    pool = cluster.pools["n1"]
    pool.volumes.clear()  # so that the check of the parameters is reached
    async with refused(Code.INVALID_ARGUMENT):
        await sidecar.controller.CreateVolume(
            csi_pb2.CreateVolumeRequest(name="pvc", parameters={"unknown": "1"})
        )
    assert list(cluster.placements().values()) == [pool.pool_id()]


async def test_clone_is_made_where_its_source_is(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    source = await sidecar.create("source", "n2")
    for number in range(6):
        await sidecar.create(f"clone-{number}", source=source.volume_id)
        assert cluster.homes(f"clone-{number}") == ["n2"]


async def test_clone_in_another_topology_than_its_source_is_resource_exhausted(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    source = await sidecar.create("source", "n2")
    async with refused(Code.RESOURCE_EXHAUSTED):
        await sidecar.create("clone", "n1", source=source.volume_id)
    assert cluster.homes("clone") == []
    assert len(cluster.placements()) == 1


async def test_clone_of_an_absent_nodes_volume_waits(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    source = await sidecar.create("source", "n2")
    cluster.store.cut("n2")
    async with refused(Code.UNAVAILABLE):
        await sidecar.create("clone", source=source.volume_id)
    async with refused(Code.NOT_FOUND):
        await sidecar.create("clone", source="no-such-id")
    assert cluster.homes("clone") == []
