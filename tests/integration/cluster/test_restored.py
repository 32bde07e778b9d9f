"""An etcd that was restored from a backup, under nodes and controllers that go on running.

What it has forgotten is in the pools; what it remembers again is not true any more.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.cli.doctor.etcd import findings as doctor
from crust.cli.doctor.finding import Finding, Level
from crust.cluster.etcd import connect
from crust.cluster.etcd.client import writes
from crust.cluster.etcd.client.watches import Changes, Follower, Listing
from crust.cluster.etcd.keys import Keys
from crust.cluster.protocol import LeadershipLost
from crust.wire.csi.v1 import csi_pb2
from examples.cluster import etcd as members
from examples.cluster.etcd import PREFIX, Etcd
from tests.integration.cluster.test_central import NODES, Nodes, controller, surveyed
from tests.support.cluster.central_cluster import all_of
from tests.support.cluster.cluster_contract import WAIT_S, eventually
from tests.support.cluster.etcd_cluster import EtcdCluster

KEYS = Keys(PREFIX)
Code = grpc.StatusCode


class Restorable:
    """A member of etcd with three nodes, and a backup of it."""

    def __init__(self, etcd: Etcd, nodes: Nodes, backup: Path) -> None:
        self.etcd = etcd
        self.nodes = nodes
        self._backup = backup

    async def save(self) -> None:
        """Make the backup."""
        await asyncio.to_thread(self.etcd.ctl, "snapshot", "save", str(self._backup))

    async def restore(self) -> None:
        """Lose all since the backup."""
        self.etcd.restore(self._backup)
        await asyncio.to_thread(self.etcd.wait_ready)


@pytest.fixture
async def restorable(tmp_path: Path) -> AsyncIterator[Restorable]:
    with members.running(tmp_path, nodes=NODES) as etcd:
        nodes = Nodes(etcd)
        await nodes.join(*NODES)
        try:
            yield Restorable(etcd, nodes, tmp_path / "backup")
        finally:
            await nodes.leave(*NODES)


async def test_volumes_made_since_the_backup_are_found_while_nodes_run(
    restorable: Restorable, caplog: pytest.LogCaptureFixture
) -> None:
    """One volume is new since the backup; another one was deleted, and created again on another node."""
    nodes = restorable.nodes
    async with controller(nodes) as sidecar:
        await surveyed(nodes)
        moved = await sidecar.create("moved", "n10")
        await restorable.save()
        await sidecar.create("new", "n1")
        await sidecar.delete(moved.volume_id)
        await sidecar.create("moved", "n2")
        caplog.set_level(logging.WARNING)
        await restorable.restore()
    async with controller(nodes) as sidecar:
        new = await _repeated(sidecar, "new", "n2")  # retries, whatever they ask for
        again = await _repeated(sidecar, "moved", "n10")
    assert nodes.homes("new") == ["n1"]
    assert nodes.homes("moved") == ["n2"]
    assert new.volume_id == nodes.pools["n1"].ids.volume_id("new")
    assert again.volume_id == nodes.pools["n2"].ids.volume_id("moved")
    assert "the store has lost its latest history" in caplog.text
    assert "one name is in two pools" not in caplog.text


async def _repeated(sidecar: Any, name: str, node: str) -> csi_pb2.Volume:
    """CreateVolume as external-provisioner does it."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                volume: csi_pb2.Volume = await sidecar.create(name, node)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (Code.UNAVAILABLE, Code.ABORTED):
                    raise
                await asyncio.sleep(0.1)
            else:
                return volume


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_deletion_that_comes_back_does_not_delete_the_volume_that_was_created_again(
    restorable: Restorable, *, is_restarted: bool
) -> None:
    """The backup has the request, which was answered since: it would be carried out a second time."""
    nodes, pool = restorable.nodes, restorable.nodes.pools["n1"]
    async with controller(nodes) as sidecar:
        await surveyed(nodes)
        volume = await sidecar.create("pvc", "n1")
        pool.gate.clear()
        pool.arrived.clear()
        deleting = asyncio.create_task(sidecar.delete(volume.volume_id))
        await pool.arrived.wait()
        await restorable.save()
        pool.gate.set()
        await all_of([deleting])
        await sidecar.create("pvc", "n1")
        deletions = pool.calls.count("DeleteVolume")
        if is_restarted:
            await nodes.leave("n1")
        await restorable.restore()
        if is_restarted:
            await nodes.join("n1")
        await eventually(lambda: not _requests(restorable.etcd))
    assert pool.calls.count("DeleteVolume") == deletions
    assert nodes.homes("pvc") == ["n1"]


async def test_creation_that_comes_back_makes_no_second_volume(restorable: Restorable) -> None:
    nodes, pool = restorable.nodes, restorable.nodes.pools["n1"]
    async with controller(nodes) as sidecar:
        await surveyed(nodes)
        pool.gate.clear()
        pool.arrived.clear()
        creating = asyncio.create_task(sidecar.create("pvc", "n1"))
        await pool.arrived.wait()
        await restorable.save()
        pool.gate.set()
        volume = await creating
        await sidecar.delete(volume.volume_id)
        await sidecar.create("pvc", "n2")
        await nodes.leave("n1")
        await restorable.restore()
        await nodes.join("n1")
        await eventually(lambda: not _requests(restorable.etcd))
    assert nodes.homes("pvc") == ["n2"]


def _requests(etcd: Etcd) -> list[str]:
    keys = etcd.keys()
    return [key for key in keys if "/requests/" in key]


async def test_leader_that_is_in_the_backup_leads_no_longer(restorable: Restorable) -> None:
    """Its key and its lease are there again, so etcd would take its writes; what it remembers is not true."""
    async with AsyncExitStack() as stack:
        leader = await EtcdCluster(restorable.etcd, stack).controller()
        async with leader.lead("c") as term:
            await leader.place("volume-1", "a")
            await restorable.save()
            await leader.unplace("volume-1", "a")
            for number in range(20):
                await leader.place(f"volume-{number + 2}", "a")
            await restorable.restore()
            await asyncio.wait_for(term.lost(), WAIT_S)
            with pytest.raises(LeadershipLost):
                await leader.place("volume-1", "b")


async def test_watch_that_begins_after_the_end_of_the_history_lists_again(
    etcd: Etcd, cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd is restored between a listing and its watch: the watch is created, and silent for ever."""
    listing = writes.listing
    asked: list[int] = []

    async def of_lost_history(*args: Any, **kwargs: Any) -> Any:
        revision, kvs = await listing(*args, **kwargs)
        asked.append(revision)
        return (revision + 1000 if len(asked) == 1 else revision), kvs

    monkeypatch.setattr(writes, "listing", of_lost_history)
    async with connect.client(etcd.settings("controller")) as client:
        follower = Follower(client, *KEYS.node("n1"), what="the test")
        async with contextlib.aclosing(follower.follow()) as following, asyncio.timeout(WAIT_S):
            assert isinstance(await anext(following), Listing)
            etcd.ctl("put", KEYS.announce("n1").decode(), "y")
            changed = await anext(following)
            assert isinstance(changed, Changes)
            assert [event.kv.value for event in changed.events] == [b"y"]


async def test_node_whose_store_went_back_says_so_in_its_announcement_and_doctor_repeats_it(
    restorable: Restorable,
) -> None:
    async with AsyncExitStack() as stack:
        cluster = EtcdCluster(restorable.etcd, stack)
        reader = await cluster.controller()

        def said() -> tuple[int, int]:
            return next(((a.capacity_bytes, a.restored) for a in reader.nodes().values()), (0, 0))

        await restorable.save()
        await restorable.nodes.leave("n2", "n10")
        pool = restorable.nodes.pools["n1"]
        for _ in range(20):
            pool.capacity -= 1
            await eventually(lambda: (pool.capacity, 0) == said())
        await restorable.restore()
        await eventually(lambda: (pool.capacity, 1) == said())
        for user in ("n1", "controller"):
            (found,) = await asyncio.to_thread(_said_by_doctor, restorable.etcd, user)
            assert found.level is Level.WARNING
            assert found.what.endswith("since the start of n1")


def _said_by_doctor(etcd: Etcd, user: str) -> list[Finding]:
    found = doctor(etcd.settings(user), "n1", is_node=user == "n1")
    return [each for each in found if "restored" in each.what]
