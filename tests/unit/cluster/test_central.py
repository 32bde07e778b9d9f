"""One controller for many nodes: creation without a duplicate, routing, and the answer to each disturbance."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from crust import errors, pool_ids
from crust.cluster import listing
from crust.cluster.central import Central
from crust.cluster.names import StoreIsNew
from crust.cluster.protocol import StoreUnavailable
from crust.wire.csi.v1 import csi_pb2
from tests.support.central_cluster import (
    DESCRIBED,
    Sidecar,
    SimulatedCluster,
    all_of,
    leading,
    refused,
    simulated,
)
from tests.support.cluster_contract import eventually
from tests.support.memory_cluster import MemoryController
from tests.support.simulated_pools import GIB, KEY

Code = grpc.StatusCode
NODES = ("n1", "n2", "n3")


@pytest.fixture
async def cluster() -> AsyncIterator[SimulatedCluster]:
    async with simulated(*NODES) as cluster:
        yield cluster


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


async def test_node_that_goes_down_during_a_create_keeps_the_name(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    n1 = cluster.pools["n1"]
    n1.gate.clear()
    creating = asyncio.create_task(sidecar.create("pvc", "n1"))
    await n1.arrived.wait()
    cluster.store.cut("n1")
    async with refused(Code.UNAVAILABLE):
        await creating
    async with refused(Code.UNAVAILABLE) as found:
        await sidecar.create("pvc", "n2")
    assert "NodeAbsent" in (found[0].details() or "")
    assert cluster.homes("pvc") == []
    n1.gate.set()
    cluster.store.heal("n1")
    await eventually(lambda: "n1" in cluster.store.kept.announcements)
    await sidecar.create("pvc", "n1")
    assert cluster.homes("pvc") == ["n1"]


async def test_lost_answer_is_asked_for_again_and_makes_no_second_volume(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    cluster.store.lose_next_answer()
    await sidecar.create("pvc")
    assert len(cluster.homes("pvc")) == 1
    assert sum(pool.calls.count("CreateVolume") for pool in cluster.pools.values()) == 1


async def test_answer_that_its_controller_never_got_is_found_by_the_next_controller(
    cluster: SimulatedCluster,
) -> None:
    async with leading(cluster.store.controller("c1")) as first:
        await cluster.surveyed()
        cluster.store.hold_answers(held=True)
        async with refused(Code.ABORTED, Code.DEADLINE_EXCEEDED):
            await first.create("pvc", timeout=0.5)
        await eventually(lambda: bool(cluster.store.kept.answers))  # for a caller that has left
    cluster.store.hold_answers(held=False)
    async with leading(cluster.store.controller("c2")) as second:
        await second.create("pvc")
    assert len(cluster.homes("pvc")) == 1
    assert sum(pool.calls.count("CreateVolume") for pool in cluster.pools.values()) == 2


async def test_duplicated_request_is_carried_out_once(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    n1 = cluster.pools["n1"]
    n1.gate.clear()
    creating = asyncio.create_task(sidecar.create("pvc", "n1"))
    await n1.arrived.wait()
    cluster.store.redeliver("n1")
    await asyncio.sleep(0)
    n1.gate.set()
    await creating
    assert n1.calls == ["CreateVolume"]


async def test_late_answer_reaches_the_retry_which_joins_the_operation(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    cluster.store.hold_answers(held=True)
    async with refused(Code.ABORTED, Code.DEADLINE_EXCEEDED):
        await sidecar.create("pvc", "n1", timeout=0.3)
    await eventually(lambda: bool(cluster.store.kept.answers))
    again = asyncio.create_task(sidecar.create("pvc", "n1"))
    await asyncio.sleep(0)
    cluster.store.hold_answers(held=False)
    await again
    assert cluster.pools["n1"].calls == ["CreateVolume"]


async def test_lost_store_is_filled_again_and_a_retried_create_finds_its_volume(
    cluster: SimulatedCluster,
) -> None:
    async with leading(cluster.store.controller("c1")) as first:
        await first.create("pvc", "n1")
    cluster.store.wipe()
    await eventually(lambda: set(cluster.store.kept.announcements) == set(NODES))
    async with leading(cluster.store.controller("c2")) as second:
        volume = await second.create("pvc", "n2")  # whatever is asked for now
    assert volume.volume_id == cluster.pools["n1"].ids.volume_id("pvc")
    assert cluster.homes("pvc") == ["n1"]


async def test_lost_store_and_a_node_that_is_away_creates_no_new_name(
    cluster: SimulatedCluster,
) -> None:
    await cluster.pools["n1"].CreateVolume(csi_pb2.CreateVolumeRequest(name="pvc"), None)
    cluster.store.cut("n1")  # known, and never surveyed
    async with leading(cluster.store.controller("c")) as sidecar:
        async with refused(Code.UNAVAILABLE) as found:
            await sidecar.create("pvc")
        assert "NamesUnknown" in (found[0].details() or "")
        await cluster.store.controller("operator").retire("n1")
        await sidecar.create("pvc")
    assert cluster.homes("pvc")[0] == "n1"
    assert len(cluster.homes("pvc")) == 2  # the operator said that n1 is gone for good


async def test_name_that_was_made_again_while_its_node_was_unknown_is_reported_at_its_return(
    cluster: SimulatedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.store.cut("n1")
    cluster.store.wipe()  # nobody knows n1 any more
    request = csi_pb2.CreateVolumeRequest(name="pvc")
    await cluster.pools["n1"].CreateVolume(request, None)
    await eventually(lambda: {"n2", "n3"} <= set(cluster.store.kept.announcements))
    async with leading(cluster.store.controller()) as sidecar:
        await sidecar.create("pvc")
        cluster.store.heal("n1")
        await cluster.surveyed()
    assert len(cluster.homes("pvc")) == 2  # what docs/multi-node.md says is not covered
    assert "one name is in two pools" in caplog.text


async def test_empty_store_creates_no_new_name_before_the_nodes_had_time_to_announce(
    cluster: SimulatedCluster,
) -> None:
    store = cluster.store.controller()
    central = Central(store, DESCRIBED, settle_s=3600)
    async with central.leading("c"):
        async with refused(Code.UNAVAILABLE) as found:
            await Sidecar(central).create("pvc")
        assert "StoreIsNew" in (found[0].details() or "")
        await store.place("volume-" + pool_ids.digest("known"), cluster.pools["n1"].pool_id())
        await Sidecar(central).create("known")
    async with leading(cluster.store.controller()) as sidecar:
        await sidecar.create("pvc")


async def test_volumes_of_a_node_that_joins_are_recorded(cluster: SimulatedCluster) -> None:
    for number in range(3):
        request = csi_pb2.CreateVolumeRequest(name=f"old-{number}")
        await cluster.pools["n3"].CreateVolume(request, None)
    sidecar = await cluster.controller()
    await cluster.surveyed()
    assert sorted(cluster.placements().values()) == [cluster.pools["n3"].pool_id()] * 3
    await sidecar.create("old-1", "n1")
    assert cluster.homes("old-1") == ["n3"]


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


async def test_publish_goes_to_the_pools_node_and_to_no_other(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    volume = await sidecar.create("pvc", "n1")
    request = csi_pb2.ControllerPublishVolumeRequest(volume_id=volume.volume_id, node_id="n1")
    await sidecar.controller.ControllerPublishVolume(request)
    assert cluster.pools["n1"].published == {volume.volume_id: "n1"}
    request.node_id = "n2"
    async with refused(Code.FAILED_PRECONDITION) as found:
        await sidecar.controller.ControllerPublishVolume(request)
    assert "n1" in (found[0].details() or "")
    request.node_id = "nobody"
    async with refused(Code.NOT_FOUND):
        await sidecar.controller.ControllerPublishVolume(request)
    away = csi_pb2.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id, node_id="n1")
    await sidecar.controller.ControllerUnpublishVolume(away)
    assert cluster.pools["n1"].published == {}


async def test_expand_reaches_the_node_and_its_answer_comes_back(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    volume = await sidecar.create("pvc", "n3")
    request = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id, capacity_range=csi_pb2.CapacityRange(required_bytes=3 * GIB)
    )
    response = await sidecar.controller.ControllerExpandVolume(request)
    assert response.capacity_bytes == 3 * GIB
    assert cluster.pools["n3"].volumes[volume.volume_id].capacity_bytes == 3 * GIB


async def test_answer_of_a_node_keeps_its_code_and_its_errors_name(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    missing = cluster.pools["n1"].ids.volume_id("never")
    async with refused(Code.NOT_FOUND) as found:
        await sidecar.controller.ControllerGetVolume(
            csi_pb2.ControllerGetVolumeRequest(volume_id=missing)
        )
    assert found[0].details() == f"[NotFound] there is no volume {missing}"


async def test_calls_for_an_absent_node_are_unavailable_and_for_a_retired_one_gone(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    volume = await sidecar.create("pvc", "n1")
    cluster.store.cut("n1")
    get = csi_pb2.ControllerGetVolumeRequest(volume_id=volume.volume_id)
    async with refused(Code.UNAVAILABLE):
        await sidecar.delete(volume.volume_id)
    async with refused(Code.UNAVAILABLE):
        await sidecar.controller.ControllerGetVolume(get)
    await cluster.store.controller("operator").retire("n1")
    async with refused(Code.NOT_FOUND):
        await sidecar.controller.ControllerGetVolume(get)
    away = csi_pb2.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id, node_id="n1")
    await sidecar.controller.ControllerUnpublishVolume(away)
    await sidecar.delete(volume.volume_id)
    assert cluster.placements() == {}


async def test_node_that_comes_back_with_a_retired_pool_gets_no_calls(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    volume = await sidecar.create("pvc", "n1")
    cluster.store.cut("n1")
    await cluster.store.controller("operator").retire("n1")
    cluster.store.heal("n1")
    await eventually(lambda: "n1" in cluster.store.kept.announcements)
    before = list(cluster.pools["n1"].calls)
    async with refused(Code.RESOURCE_EXHAUSTED):
        await sidecar.create("pvc-2", "n1")
    await sidecar.delete(volume.volume_id)
    assert await sidecar.listed() == []
    assert cluster.pools["n1"].calls == before
    assert volume.volume_id in cluster.pools["n1"].volumes


async def test_name_in_a_retired_pool_is_free_at_once(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    await sidecar.create("pvc", "n1")
    cluster.store.cut("n1")
    await cluster.store.controller("operator").retire("n1")
    volume = await sidecar.create("pvc", "n2")
    assert volume.volume_id == cluster.pools["n2"].ids.volume_id("pvc")


async def test_name_that_may_stand_at_a_node_moves_once_that_node_says_that_it_does_not(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    n1 = cluster.pools["n1"]
    n1.gate.clear()
    creating = asyncio.create_task(sidecar.create("pvc", "n1"))
    await n1.arrived.wait()
    cluster.store.cut("n1")
    async with refused(Code.UNAVAILABLE):
        await creating
    n1.capacity = 0
    n1.gate.set()
    cluster.store.heal("n1")
    await eventually(lambda: "n1" in cluster.store.kept.announcements)
    await sidecar.create("pvc", "n2")
    assert cluster.homes("pvc") == ["n2"]


async def test_delete_of_a_pool_that_was_never_announced_is_no_success(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    async with refused(Code.UNAVAILABLE):
        await sidecar.delete("ffffffffffffffff-" + "0" * 40)
    await sidecar.delete("not-an-id-of-ours")


async def test_node_back_with_another_pool_leaves_the_first_one_absent(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    volume = await sidecar.create("pvc", "n1")
    pool = cluster.pools["n1"]
    before, pool.ids = pool.ids, type(pool.ids)("00000000000000ff")
    await eventually(lambda: cluster.store.kept.announcements["n1"].pool_id == "00000000000000ff")
    async with refused(Code.UNAVAILABLE) as found:
        await sidecar.delete(volume.volume_id)
    assert before.pool_id in (found[0].details() or "")
    async with refused(Code.UNAVAILABLE):  # the name keeps its pool
        await sidecar.create("pvc", "n1")
    await sidecar.create("other", "n1")
    assert pool.ids.volume_id("other") in pool.volumes


async def test_pool_announced_by_two_nodes_is_served_by_neither(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    volume = await sidecar.create("pvc", "n1")
    said = await cluster.pools["n1"].announcement()
    assert said is not None
    await cluster.join("n4")
    cluster.pools["n4"].ids = cluster.pools["n1"].ids
    await eventually(lambda: cluster.store.kept.announcements["n4"].pool_id == said.pool_id)
    async with refused(Code.UNAVAILABLE) as found:
        await sidecar.delete(volume.volume_id)
    assert "PoolAnnouncedTwice" in (found[0].details() or "")
    assert volume.volume_id in cluster.pools["n1"].volumes


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


async def test_snapshot_that_failed_for_good_leaves_no_record(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    missing = cluster.pools["n1"].ids.volume_id("never")
    async with refused(Code.NOT_FOUND):
        await sidecar.controller.CreateSnapshot(
            csi_pb2.CreateSnapshotRequest(name="s", source_volume_id=missing)
        )
    assert cluster.placements() == {}


async def test_health_of_another_csi_than_the_nodes_speak_is_unimplemented(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()  # its nodes speak CSI 1.12
    get = csi_pb2.ControllerGetVolumeHealthRequest(volume_id="no-id-of-ours")
    async with refused(Code.UNIMPLEMENTED):
        await sidecar.controller.ControllerGetVolumeHealth(get)
    async with refused(Code.UNIMPLEMENTED):
        await sidecar.controller.ControllerListVolumeHealth(
            csi_pb2.ControllerListVolumeHealthRequest()
        )


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


async def test_snapshot_name_of_another_source_is_refused(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    one, two = await sidecar.create("a", "n1"), await sidecar.create("b", "n2")
    request = csi_pb2.CreateSnapshotRequest(name="s", source_volume_id=one.volume_id)
    await sidecar.controller.CreateSnapshot(request)
    request.source_volume_id = two.volume_id
    async with refused(Code.ALREADY_EXISTS):
        await sidecar.controller.CreateSnapshot(request)
    assert cluster.pools["n2"].snapshots == {}


async def test_group_across_nodes_is_refused_and_one_on_a_node_made(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    a, b, c = (
        await sidecar.create("a", "n1"),
        await sidecar.create("b", "n1"),
        await sidecar.create("c", "n2"),
    )
    request = csi_pb2.CreateVolumeGroupSnapshotRequest(
        name="g", source_volume_ids=[a.volume_id, c.volume_id]
    )
    async with refused(Code.FAILED_PRECONDITION):
        await sidecar.groups.CreateVolumeGroupSnapshot(request)
    del request.source_volume_ids[:]
    request.source_volume_ids.extend([a.volume_id, b.volume_id])
    response = await sidecar.groups.CreateVolumeGroupSnapshot(request)
    assert response.group_snapshot.ready_to_use


@pytest.mark.parametrize("most", [0, 3])
async def test_metadata_is_streamed_in_bounded_pieces(cluster: SimulatedCluster, most: int) -> None:
    sidecar = await cluster.controller()
    request = csi_pb2.GetMetadataAllocatedRequest(
        snapshot_id=cluster.pools["n1"].ids.snapshot_id("s"), max_results=most
    )
    pieces = [each async for each in sidecar.metadata.GetMetadataAllocated(request)]
    offsets = [block.byte_offset for each in pieces for block in each.block_metadata]
    assert offsets == [n * 4096 for n in range(10)]
    assert max(len(each.block_metadata) for each in pieces) <= (most or 4)


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


async def test_node_info_is_the_nodes_own_answer(cluster: SimulatedCluster) -> None:
    sidecar = await cluster.controller()
    ask = sidecar.controller.ControllerGetNodeInfo
    got = await ask(csi_pb2.ControllerGetNodeInfoRequest(node_id="n1"))
    assert got.max_volumes_per_node == 7
    async with refused(Code.NOT_FOUND):
        await ask(csi_pb2.ControllerGetNodeInfoRequest(node_id="nobody"))
    cluster.store.cut("n1")
    async with refused(Code.UNAVAILABLE):
        await ask(csi_pb2.ControllerGetNodeInfoRequest(node_id="n1"))


async def test_secrets_mount_flags_and_tokens_never_reach_the_store(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    request = csi_pb2.CreateVolumeRequest(name="pvc", secrets={"passphrase": "hunter2"})
    capability = request.volume_capabilities.add()
    capability.mount.mount_flags.append("password=hunter2")
    capability.access_mode.mode = csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
    made = await sidecar.controller.CreateVolume(request)
    publish = csi_pb2.ControllerPublishVolumeRequest(
        volume_id=made.volume.volume_id,
        node_id=made.volume.accessible_topology[0].segments[KEY],
        secrets={"passphrase": "hunter2"},
        volume_context={"csi.storage.k8s.io/serviceAccount.tokens": "hunter2", "kept": "1"},
    )
    await sidecar.controller.ControllerPublishVolume(publish)
    assert cluster.store.asked
    sent = [each for _, each in cluster.store.asked]
    assert all(b"hunter2" not in each.message for each in sent)
    assert any(b"kept" in each.message for each in sent)
    assert request.secrets["passphrase"] == "hunter2"


async def test_standby_is_not_ready_and_unavailable_until_it_leads(
    cluster: SimulatedCluster,
) -> None:
    async with leading(cluster.store.controller("c1")) as first:
        central = Central(cluster.store.controller("c2"), DESCRIBED, settle_s=0)
        second = Sidecar(central)
        waiting = asyncio.create_task(central.lead("c2"))
        probe = csi_pb2.ProbeRequest()
        assert (await first.identity.Probe(probe)).ready.value
        # /readyz of one that waits: all replicas of a Deployment are to be ready, and one leads
        assert (first.central.problem(), central.problem()) == (None, None)
        assert not (await second.identity.Probe(probe)).ready.value
        async with refused(Code.UNAVAILABLE):
            await second.create("pvc")
        await second.controller.ControllerGetCapabilities(
            csi_pb2.ControllerGetCapabilitiesRequest()
        )
    await eventually(lambda: central.calls.leads)
    await eventually(lambda: "settled" in cluster.store.kept.placements)
    await second.create("pvc")
    cluster.store.depose()
    await asyncio.wait([waiting])
    assert type(waiting.exception()).__name__ == "LeadershipLost"
    async with refused(Code.UNAVAILABLE):
        await second.create("pvc-2")


async def test_controller_cut_from_the_store_answers_unavailable(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await sidecar.create("pvc", "n1")
    assert sidecar.central.problem() is None
    cluster.store.cut("controller")
    assert isinstance(sidecar.central.problem(), StoreUnavailable)
    async with refused(Code.UNAVAILABLE):
        await sidecar.create("pvc-2", "n1")
    assert cluster.homes("pvc-2") == []


async def test_leader_in_a_new_store_has_a_problem_until_the_nodes_had_time(
    cluster: SimulatedCluster,
) -> None:
    cluster.store.wipe()
    central = Central(cluster.store.controller(), DESCRIBED, settle_s=2)
    async with central.leading("c1"):
        await eventually(lambda: isinstance(central.problem(), StoreIsNew))
        await eventually(lambda: central.problem() is None)
        assert "settled" in cluster.store.kept.placements


async def test_slow_node_is_aborted_at_the_callers_deadline_and_others_go_on(
    cluster: SimulatedCluster,
) -> None:
    sidecar = await cluster.controller()
    await cluster.surveyed()
    cluster.pools["n1"].gate.clear()
    async with refused(Code.ABORTED, Code.DEADLINE_EXCEEDED):
        await sidecar.create("pvc-1", "n1", timeout=0.3)
    await cluster.pools["n1"].arrived.wait()
    await sidecar.create("pvc-2", "n2")
    async with refused(Code.ABORTED):
        await sidecar.create("pvc-1", "n1", size=2 * GIB)
    cluster.pools["n1"].gate.set()
    await sidecar.create("pvc-1", "n1")
    assert cluster.pools["n1"].calls == ["CreateVolume"]
