"""The central controller and its nodes' agents on a real member of etcd, with TLS and access by role.

The same disturbances as in tests/unit/cluster, where the store is in memory, made with what really
happens: connections end, the member stops or loses its data, an agent dies between the work and the answer.
"""

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from examples.cluster import etcd as members
from examples.cluster.etcd import Etcd
from tests.support.cluster.central_cluster import Sidecar, all_of, leading, refused
from tests.support.cluster.cluster_contract import eventually
from tests.support.cluster.etcd_cluster import EtcdCluster
from tests.support.cluster.simulated_pools import GIB, SimulatedPool, joined

Code = grpc.StatusCode
NODES = ("n1", "n2", "n10")


class Nodes:
    """Simulated pools, whose agents come and go."""

    def __init__(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.pools = {node: SimulatedPool(node, n + 1) for n, node in enumerate(NODES)}
        self._joined = {node: AsyncExitStack() for node in NODES}

    async def join(self, *names: str) -> None:
        """Connect nodes, each with its own certificate."""
        for name in names:
            stack = self._joined[name] = AsyncExitStack()
            store = await EtcdCluster(self.etcd, stack).node(name)
            await stack.enter_async_context(joined(self.pools[name], store))

    async def leave(self, *names: str) -> None:
        """End agents and connections."""
        for name in names:
            await self._joined[name].aclose()

    def homes(self, name: str) -> list[str]:
        """The nodes that have a volume of that name."""
        pools = self.pools.items()
        return [node for node, pool in pools if pool.ids.volume_id(name) in pool.volumes]


@pytest.fixture
async def nodes(etcd: Etcd) -> AsyncIterator[Nodes]:
    """Three connected nodes."""
    nodes = Nodes(etcd)
    await nodes.join(*NODES)
    try:
        yield nodes
    finally:
        await nodes.leave(*NODES)


@asynccontextmanager
async def controller(nodes: Nodes, *connected: str) -> AsyncIterator[Sidecar]:
    """A controller with a connection of its own that leads, and knows these nodes or all."""
    async with AsyncExitStack() as stack:
        store = await EtcdCluster(nodes.etcd, stack).controller()
        sidecar = await stack.enter_async_context(leading(store))
        await eventually(lambda: set(connected or NODES) <= set(store.nodes()))
        yield sidecar


async def surveyed(nodes: Nodes) -> None:
    """Wait until all pools were surveyed."""
    marks = {f"/crust/placements/surveyed-{pool.pool_id()}" for pool in nodes.pools.values()}

    def are_there() -> bool:
        return marks <= set(nodes.etcd.keys())

    await eventually(are_there)


async def test_64_concurrent_creations_of_8_names_make_8_volumes(nodes: Nodes) -> None:
    async with controller(nodes) as sidecar:
        results = await all_of([sidecar.create(f"pvc-{n % 8}") for n in range(64)])
    assert [each for each in results if isinstance(each, BaseException)] == []
    assert [len(nodes.homes(f"pvc-{n}")) for n in range(8)] == [1] * 8


async def test_create_delete_create_goes_through_etcd_and_leaves_no_request(nodes: Nodes) -> None:
    async with controller(nodes) as sidecar:
        volume = await sidecar.create("pvc", "n2")
        assert nodes.homes("pvc") == ["n2"]
        await sidecar.delete(volume.volume_id)
        await sidecar.create("pvc", "n10")
        assert nodes.homes("pvc") == ["n10"]
    keys = nodes.etcd.keys()
    assert [each for each in keys if "/requests/" in each or "/answers/" in each] == []


async def test_node_that_dies_during_a_create_keeps_the_name_until_it_is_back(
    nodes: Nodes,
) -> None:
    async with controller(nodes) as sidecar:
        await surveyed(nodes)
        pool = nodes.pools["n1"]
        pool.gate.clear()
        creating = asyncio.create_task(sidecar.create("pvc", "n1"))
        await pool.arrived.wait()
        await nodes.leave("n1")
        async with refused(Code.UNAVAILABLE):
            await creating
        async with refused(Code.UNAVAILABLE):
            await sidecar.create("pvc", "n2")
        assert nodes.homes("pvc") == []
        pool.gate.set()
        await nodes.join("n1")
        await eventually(lambda: "n1" in sidecar.central.router.store.nodes())
        await sidecar.create("pvc")
        assert nodes.homes("pvc") == ["n1"]


async def test_agent_that_dies_between_work_and_answer_makes_one_volume(nodes: Nodes) -> None:
    async with controller(nodes) as sidecar:
        await surveyed(nodes)
        pool = nodes.pools["n1"]
        pool.gate.clear()
        creating = asyncio.create_task(sidecar.create("pvc", "n1"))
        await pool.arrived.wait()
        await nodes.leave("n1")  # the request was begun, and stays in etcd
        pool.gate.set()
        await nodes.join("n1")
        results = await all_of([creating])
        if isinstance(results[0], grpc.aio.AioRpcError):
            assert results[0].code() is Code.UNAVAILABLE
            await sidecar.create("pvc", "n1")
        assert nodes.homes("pvc") == ["n1"]


async def test_second_controller_takes_over_and_finds_what_the_first_began(nodes: Nodes) -> None:
    async with controller(nodes) as first:
        await surveyed(nodes)
        pool = nodes.pools["n2"]
        pool.gate.clear()
        async with refused(Code.ABORTED, Code.DEADLINE_EXCEEDED):
            await first.create("pvc", "n2", timeout=1)
        await pool.arrived.wait()
    pool.gate.set()
    async with controller(nodes) as second:
        volume = await second.create("pvc", "n1")  # its pool is recorded, whatever is asked for
    assert volume.volume_id == pool.ids.volume_id("pvc")
    assert nodes.homes("pvc") == ["n2"]


async def test_retired_node_gives_its_names_free_and_its_volumes_can_be_deleted(
    nodes: Nodes,
) -> None:
    async with controller(nodes) as sidecar:
        await surveyed(nodes)
        volume = await sidecar.create("pvc", "n1")
        await nodes.leave("n1")
        await eventually(lambda: "n1" not in sidecar.central.router.store.nodes())
        async with refused(Code.UNAVAILABLE):
            await sidecar.delete(volume.volume_id)
        async with AsyncExitStack() as stack:
            operator = await EtcdCluster(nodes.etcd, stack).controller()
            await eventually(lambda: "n1" in operator.known_pools().values())
            await operator.retire("n1")
        retired = sidecar.central.router.store.retired_pools
        await eventually(lambda: nodes.pools["n1"].pool_id() in retired())
        await sidecar.delete(volume.volume_id)
        await sidecar.create("pvc")
        assert nodes.homes("pvc")[-1] != "n1"


async def test_frozen_store_is_unavailable_and_serves_when_it_goes_on(
    nodes: Nodes,
) -> None:
    async with controller(nodes) as sidecar:
        await sidecar.create("pvc-1", "n1")
        nodes.etcd.members[0].pause()
        try:
            async with refused(Code.UNAVAILABLE, Code.ABORTED, Code.DEADLINE_EXCEEDED):
                await sidecar.create("pvc-2", "n1", timeout=1)
        finally:
            nodes.etcd.members[0].go_on()
        await sidecar.create("pvc-2", "n1", timeout=20)
    assert nodes.homes("pvc-2") == ["n1"]


async def test_backup_restored_as_the_page_says_makes_no_volume_twice(tmp_path: Path) -> None:
    """The backup is older than a volume, and than the retirement of a node."""
    backup = tmp_path / "backup"
    with members.running(tmp_path, nodes=NODES) as etcd:
        nodes = Nodes(etcd)
        await nodes.join(*NODES)
        try:
            async with controller(nodes) as sidecar:
                await surveyed(nodes)
                gone = await sidecar.create("pvc-0", "n10")
                etcd.ctl("snapshot", "save", str(backup))
                await sidecar.create("pvc-1", "n1")
                await nodes.leave("n10")
                await eventually(lambda: "n10" not in sidecar.central.router.store.nodes())
                await sidecar.central.router.store.retire("n10")
            await nodes.leave("n1", "n2")
            etcd.restore(backup)
            await asyncio.to_thread(etcd.wait_ready)
            for line in commands_of_the_page():
                program, *words = shlex.split(line)
                assert program == "etcdctl"
                etcd.ctl(*words)
            await nodes.join("n1", "n2")
            async with controller(nodes, "n1", "n2") as sidecar:
                async with refused(Code.UNAVAILABLE) as found:
                    await sidecar.delete(gone.volume_id)
                assert "NodeAbsent" in (found[0].details() or "")
                await sidecar.central.router.store.retire("n10")
                await sidecar.delete(gone.volume_id)
                volume = await sidecar.create("pvc-1", "n2")  # a retry, whatever it asks for
            assert volume.volume_id == nodes.pools["n1"].ids.volume_id("pvc-1")
            assert nodes.homes("pvc-1") == ["n1"]
        finally:
            await nodes.leave(*NODES)


def commands_of_the_page() -> list[str]:
    """What docs/multi-node.md has an operator run after a backup was restored."""
    page = (Path(__file__).parents[3] / "docs" / "multi-node.md").read_text(encoding="utf-8")
    section = page.partition("\n## Restore etcd from a backup\n")[2].partition("\n## ")[0]
    found = [each.strip() for each in section.splitlines() if each.startswith("    etcdctl ")]
    assert found
    return found


async def test_wiped_store_is_filled_again_and_a_retry_finds_its_volume(tmp_path: Path) -> None:
    with members.running(tmp_path, nodes=NODES) as etcd:
        nodes = Nodes(etcd)
        await nodes.join(*NODES)
        try:
            async with controller(nodes) as sidecar:
                await surveyed(nodes)
                await sidecar.create("pvc", "n1", size=2 * GIB)
            etcd.wipe()
            await asyncio.to_thread(etcd.wait_ready)
            etcd.protect(*NODES)
            async with controller(nodes) as sidecar:
                volume = await sidecar.create("pvc", "n2", size=2 * GIB)
            assert volume.volume_id == nodes.pools["n1"].ids.volume_id("pvc")
            assert nodes.homes("pvc") == ["n1"]
        finally:
            await nodes.leave(*NODES)
