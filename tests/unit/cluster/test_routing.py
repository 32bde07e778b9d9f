"""All other calls go to the node that has the pool; the answer to each disturbance on the way."""

import asyncio

import grpc
import grpc.aio
import pytest

from crust.cluster.central.app import Central
from crust.cluster.central.names import StoreIsNew
from crust.cluster.protocol import StoreUnavailable
from crust.wire.csi.v1 import csi_pb2
from tests.support.cluster.central_cluster import (
    DESCRIBED,
    Sidecar,
    SimulatedCluster,
    leading,
    refused,
)
from tests.support.cluster.cluster_contract import eventually
from tests.support.cluster.simulated_pools import GIB, KEY

Code = grpc.StatusCode


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


async def test_uncertain_name_is_placed_elsewhere_after_node_denies_it(
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


async def test_node_back_with_an_older_copy_of_its_disk_lacks_what_was_made_since(
    cluster: SimulatedCluster,
) -> None:
    """The pool has its id, so nobody can tell: what it lacks does not exist, and no call about it waits for ever."""
    sidecar = await cluster.controller()
    await cluster.surveyed()
    before = await sidecar.create("before", "n1")
    pool = cluster.pools["n1"]
    older = dict(pool.volumes)
    since = await sidecar.create("since", "n1")
    cluster.store.cut("n1")
    pool.volumes = older
    cluster.store.heal("n1")
    await eventually(lambda: "n1" in cluster.store.kept.announcements)
    assert [each.volume.volume_id for each in await sidecar.listed()] == [before.volume_id]
    expand = csi_pb2.ControllerExpandVolumeRequest(volume_id=since.volume_id)
    async with refused(Code.NOT_FOUND):
        await sidecar.controller.ControllerExpandVolume(expand)
    await sidecar.delete(since.volume_id)
    again = await sidecar.create("since", "n2")  # no record of the name is left
    assert cluster.homes("since") == ["n2"]
    assert again.volume_id != since.volume_id


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


async def test_leader_in_a_new_store_has_a_problem_until_the_nodes_had_time(
    cluster: SimulatedCluster,
) -> None:
    cluster.store.wipe()
    central = Central(cluster.store.controller(), DESCRIBED, settle_s=2)
    async with central.leading("c1"):
        await eventually(lambda: isinstance(central.problem(), StoreIsNew))
        await eventually(lambda: central.problem() is None)
        assert "settled" in cluster.store.kept.placements
