"""A node is back with an older copy of its disk: volumes made since are recorded in its pool, and are not there."""

import asyncio

import pytest

from crust import metrics
from crust.wire.csi.v1 import csi_pb2
from tests.support.cluster.central_cluster import Sidecar, SimulatedCluster, all_of, leading
from tests.support.cluster.cluster_contract import eventually

LACKS = "a pool lacks volumes that are recorded there"
TWICE = "one name is in two pools"


async def test_pool_that_is_an_older_copy_is_reported_with_the_volumes_that_it_lacks(
    cluster: SimulatedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with leading(cluster.store.controller("c")) as sidecar:
        await cluster.surveyed()
        kept = await sidecar.create("kept", "n1")
        older = dict(cluster.pools["n1"].volumes)
        counted = _count(metrics.LACKING)
        lost = await sidecar.create("lost", "n1")
        assert LACKS not in caplog.text
        await _with_disk(cluster, "older", older)
        await eventually(lambda: LACKS in caplog.text)
        found = [each.__dict__ for each in caplog.records if LACKS in each.getMessage()]
        assert [each["pool_id"] for each in found] == [cluster.pools["n1"].pool_id()]
        assert [each["volumes"] for each in found] == [1]
        assert found[0]["name_keys"].split("-")[-1] == lost.volume_id.split("-")[-1]
        assert _count(metrics.LACKING) == counted + 1
        assert kept.volume_id.split("-")[-1] not in found[0]["name_keys"]


async def test_name_that_was_created_elsewhere_beside_an_older_copy_stays_there_when_the_newer_is_back(
    cluster: SimulatedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are reported; a repeated create gets the recorded one, and a deletion the one that its id names."""
    n1 = cluster.pools["n1"]
    async with leading(cluster.store.controller("c")) as sidecar:
        await cluster.surveyed()
        first = await sidecar.create("pvc", "n1")
        newer, counted = dict(n1.volumes), _count(metrics.TWICE)
        await _with_disk(cluster, "older", {})
        second = await sidecar.create("pvc", "n2")
        assert second.volume_id == cluster.pools["n2"].ids.volume_id("pvc")
        await _with_disk(cluster, "newer", newer)
        await eventually(lambda: TWICE in caplog.text)
        assert _count(metrics.TWICE) == counted + 1
        assert (await sidecar.create("pvc", "n2")).volume_id == second.volume_id
        await sidecar.delete(first.volume_id)
        assert cluster.homes("pvc") == ["n2"]
        assert (await sidecar.create("pvc", "n2")).volume_id == second.volume_id
        assert cluster.homes("pvc") == ["n2"]


async def test_volume_that_is_being_created_is_not_reported_as_lacking(
    cluster: SimulatedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    n1 = cluster.pools["n1"]
    async with leading(cluster.store.controller("c")) as sidecar:
        await cluster.surveyed()
        n1.gate.clear()
        creating = asyncio.create_task(sidecar.create("pvc", "n1"))
        await n1.arrived.wait()
        await _with_disk(cluster, "again", {})
        await _round_has_ended(sidecar)
        n1.gate.set()
        await all_of([creating])
    assert LACKS not in caplog.text


def _count(finding: str) -> float:
    return float(metrics.survey_findings.labels(finding)._value.get())


async def _with_disk(
    cluster: SimulatedCluster, boot: str, volumes: dict[str, csi_pb2.Volume]
) -> None:
    """Start n1 with another copy of its disk, and wait until it was surveyed."""
    n1 = cluster.pools["n1"]
    n1.volumes.clear()
    n1.volumes.update(volumes)
    n1.boot = boot
    placements = cluster.store.kept.placements
    await eventually(lambda: placements.get(f"surveyed-{n1.pool_id()}") == f"{boot}-0")


async def _round_has_ended(sidecar: Sidecar) -> None:
    """What was found is compared with the records by the end of the round."""
    survey = sidecar.central.calls.survey
    await eventually(lambda: not survey._found)
