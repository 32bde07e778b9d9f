"""A store that was restored from a backup: what it remembers of names is compared with the nodes first."""

import asyncio

import grpc
import pytest

from crust.cluster.central import survey
from crust.wire.csi.v1 import csi_pb2
from tests.support.cluster.central_cluster import NODES, SimulatedCluster, all_of, leading, refused
from tests.support.cluster.cluster_contract import eventually

Code = grpc.StatusCode


def restore(cluster: SimulatedCluster, backup: dict[str, str]) -> None:
    """The records as they were; the nodes that are connected say so."""
    cluster.store.kept.placements = dict(backup)
    cluster.store.depose()
    for node in cluster.store.kept.announcements:
        cluster.pools[node].restored += 1


def said(cluster: SimulatedCluster) -> set[int]:
    """What the connected nodes have announced."""
    return {each.restored for each in cluster.store.kept.announcements.values()}


async def test_name_that_a_node_may_have_that_was_away_during_the_restore_waits_for_it(
    cluster: SimulatedCluster,
) -> None:
    """The backup says that all pools were surveyed; the volume is newer."""
    async with leading(cluster.store.controller("c1")) as first:
        await cluster.surveyed()
        backup = dict(cluster.store.kept.placements)
        await first.create("pvc", "n3")
    cluster.store.cut("n3")
    restore(cluster, backup)
    await eventually(lambda: said(cluster) == {1})
    async with leading(cluster.store.controller("c2")) as second:
        async with refused(Code.UNAVAILABLE) as found:
            await second.create("pvc", "n1")
        assert "PoolNotSurveyed" in (found[0].details() or "")
        cluster.store.heal("n3")
        await eventually(lambda: set(cluster.store.kept.announcements) == set(NODES))
        await second.create("pvc", "n1")
    assert cluster.homes("pvc") == ["n3"]


async def test_leader_whose_nodes_find_the_store_restored_surveys_all_pools_again(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The term goes on: the store's revision had passed the one that the controller knew."""
    monkeypatch.setattr(survey, "SURVEY_EVERY_S", 0.01)
    async with leading(cluster.store.controller("c1")) as sidecar:
        await cluster.surveyed()
        backup = dict(cluster.store.kept.placements)
        await sidecar.create("pvc", "n2")
        kept = dict(cluster.placements())
        cluster.store.kept.placements = dict(backup)
        cluster.pools["n1"].restored += 1
        await eventually(lambda: cluster.placements() == kept)
        await cluster.surveyed()
        await sidecar.create("pvc", "n1")
    assert cluster.homes("pvc") == ["n2"]


async def test_record_of_a_backup_that_is_outdated_is_replaced_by_the_survey(
    cluster: SimulatedCluster,
) -> None:
    """Since the backup the volume was deleted, and created again on another node."""
    async with leading(cluster.store.controller("c1")) as first:
        volume = await first.create("pvc", "n1")
        await cluster.surveyed()
        backup = dict(cluster.store.kept.placements)
        await first.delete(volume.volume_id)
        await first.create("pvc", "n2")
        recorded = dict(cluster.placements())
    restore(cluster, backup)
    await eventually(lambda: said(cluster) == {1})
    async with leading(cluster.store.controller("c2")):
        await eventually(lambda: cluster.placements() == recorded)


async def test_node_that_was_restarted_is_surveyed_again_and_the_others_are_not(
    cluster: SimulatedCluster,
) -> None:
    """It cannot know what the process before it had done."""
    async with leading(cluster.store.controller("c1")):
        await cluster.surveyed()
    kept = cluster.store.kept.placements
    n1 = cluster.pools["n1"]
    before = kept[f"surveyed-{n1.pool_id()}"]
    others = {key: value for key, value in kept.items() if n1.pool_id() not in key}
    await n1.CreateVolume(csi_pb2.CreateVolumeRequest(name="pvc"), None)
    n1.boot = "another process"
    await eventually(lambda: cluster.store.kept.announcements["n1"].boot == n1.boot)
    async with leading(cluster.store.controller("c2")):
        await eventually(lambda: kept[f"surveyed-{n1.pool_id()}"] == "another process-0")
        assert {key: kept[key] for key in others} == others
        assert list(cluster.placements().values()) == [n1.pool_id()]
    assert before != "another process-0"


async def test_new_name_waits_until_the_nodes_were_asked_whether_the_store_was_restored(
    cluster: SimulatedCluster,
) -> None:
    """What a node announces in a restored store is of the backup, until the node has seen the store."""
    async with leading(cluster.store.controller("c1")) as first:
        await cluster.surveyed()
        backup = dict(cluster.store.kept.placements)
        await first.create("pvc", "n3")
    cluster.store.kept.placements = dict(backup)
    cluster.store.hold_answers(held=True)
    asked = len(cluster.store.asked)
    async with leading(cluster.store.controller("c2")) as second:
        creating = asyncio.create_task(second.create("pvc", "n1"))
        await eventually(lambda: len(cluster.store.asked) >= asked + len(NODES))
        assert not creating.done()
        cluster.pools["n2"].restored += 1
        await eventually(lambda: 1 in said(cluster))
        cluster.store.hold_answers(held=False)
        await all_of([creating])  # refused, or found where it is
        await cluster.surveyed()
        await second.create("pvc", "n1")
    assert cluster.homes("pvc") == ["n3"]
