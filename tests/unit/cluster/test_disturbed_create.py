"""Creations whose node, controller, answer or store is lost meanwhile: no volume is made twice."""

import asyncio

import grpc
import grpc.aio
import pytest

from crust import pool_ids
from crust.cluster.central.app import Central
from crust.wire.csi.v1 import csi_pb2
from tests.support.cluster.central_cluster import (
    DESCRIBED,
    NODES,
    Sidecar,
    SimulatedCluster,
    leading,
    refused,
)
from tests.support.cluster.cluster_contract import eventually

Code = grpc.StatusCode


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
        assert "PoolNotSurveyed" in (found[0].details() or "")
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
        for name in ("known", "recorded"):
            await store.place("volume-" + pool_ids.digest(name), cluster.pools["n1"].pool_id())
        await cluster.pools["n1"].CreateVolume(csi_pb2.CreateVolumeRequest(name="known"), None)
        await Sidecar(central).create("known")
        async with refused(Code.UNAVAILABLE):  # the record may be from a backup
            await Sidecar(central).create("recorded")
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
