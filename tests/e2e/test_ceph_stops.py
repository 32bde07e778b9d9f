"""A Ceph cluster that stops answering, or loses a monitor, under a guest."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import grpc
import pytest

from crust.blockdriver.ceph import claim_object
from crust.blockdriver.ceph.binding import CephMonitorsUnreachable
from crust.core import errors
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import POOL, CephCluster
from examples.kata.runtime import daemon, volume
from examples.kata.runtime.client import RuntimeRefused
from examples.kata.vm import machine
from tests.support.ceph.image_node import IMAGE, SIZE, ImageNode, Storage, image_node

pytestmark = pytest.mark.vm


IDLE = ("noinit_itable",)
"""The guest's kernel does not go on writing to a new filesystem by itself."""


@pytest.fixture
async def node(
    storage: Storage, guest_image: object, acceleration: object
) -> AsyncIterator[ImageNode]:
    async with image_node("node-a", storage) as made:
        yield made


@contextlib.contextmanager
def stopped(ceph: CephCluster) -> Iterator[None]:
    """Monitors and OSDs are stopped (SIGSTOP) while the block runs."""
    with ceph.mon.frozen(), ceph.osd.frozen():
        yield


def holders(storage: Storage) -> list[str]:
    with storage.ceph.ioctx(POOL, storage.namespace) as ioctx:
        return [holder.sandbox for holder in claim_object.read(ioctx, IMAGE).claims.holders]


async def while_qemu_answers(node: ImageNode, sandbox: str, call: Awaitable[Any]) -> Any:
    """What the call returns or raises; QEMU answers from its beginning to its end, each question within its time."""
    calling = asyncio.ensure_future(call)
    while not calling.done():
        assert await node.status(sandbox) == "running"
    return await calling


@pytest.mark.spec("H-55")
async def test_restarted_runtime_adopts_an_image_whose_cluster_is_stopped(
    node: ImageNode, storage: Storage
) -> None:
    target = await node.publish(options=IDLE)
    await node.output("one", target, "echo kept > /data/f; sync")
    await node.end_runtime()
    with stopped(storage.ceph):
        await node.start_runtime()
        assert await node.status("one") == "running"
        sandbox = await node.sandbox("one")
        assert sandbox.mount_failures == {}
        assert [held.target.text for held in sandbox.held] == [target]
        await node.node.co.stats(IMAGE, target)
    assert await node.output("one", target, "cat /data/f") == "kept"
    storage.grow(2 * SIZE)
    await node.node.co.expand(IMAGE, target, 2 * SIZE)


@pytest.mark.spec("H-55")
async def test_image_of_a_stopped_cluster_stays_plugged(node: ImageNode, storage: Storage) -> None:
    target = await node.publish()
    await node.output("one", target, "echo kept > /data/f; sync")
    sandbox = await node.sandbox("one")
    [held] = sandbox.held
    with stopped(storage.ceph):
        unplugging = volume._detach(held.record, sandbox.vm, sandbox._handoff)
        with pytest.raises(errors.PeerUnavailable, match="Ceph cluster"):
            await while_qemu_answers(node, "one", unplugging)
        assert await sandbox.vm.has_open(held.serial)
    assert await node.output("one", target, "cat /data/f") == "kept"
    await volume._detach(held.record, sandbox.vm, sandbox._handoff)
    assert not await sandbox.vm.has_open(held.serial)


@pytest.mark.spec("H-52")
async def test_sandbox_stopped_below_stopped_cluster_leaves_nothing_once_it_runs(
    node: ImageNode, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guest cannot unmount, so it is killed; the unpublish succeeds, and the claim is given back later."""
    monkeypatch.setattr(daemon, "GIVE_BACK_S", 1)
    monkeypatch.setattr(machine, "SHUTDOWN_S", 5)
    target = await node.publish()
    await node.output("one", target, "echo kept > /data/f; sync")
    with stopped(storage.ceph):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await while_qemu_answers(node, "one", node.node.co.unpublish(IMAGE, target))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "one" in str(caught.value.details())
        await node.runtime.stop("one")
        assert await node.runtime.list() == []
        await node.node.co.unpublish(IMAGE, target)
        node.node.check_untouched(target)
    async with asyncio.timeout(120):
        while await asyncio.to_thread(list, (node.kata_run / "images").iterdir()):
            """It is given back by itself."""
    assert holders(storage) == []
    assert len(storage.free_ended()) == 1
    async with image_node("node-b", storage) as other:
        assert await other.output("two", await other.publish(), "cat /data/f") == "kept"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    with ceph_cluster.running(tmp_path_factory.mktemp("ceph") / "c", monitors=3) as cluster:
        yield cluster


async def started(node: ImageNode, sandbox: str, target: str) -> str:
    """What a new sandbox reads, started again as a kubelet does when it meets the election of a leader."""
    while True:
        try:
            return await node.output(sandbox, target, "cat /data/f")
        except RuntimeRefused as refused:
            if refused.error_name != CephMonitorsUnreachable.__name__:
                raise


async def test_dead_monitor_stops_neither_a_guest_nor_the_next_one(
    three: CephCluster, guest_image: object, acceleration: object
) -> None:
    async with image_node("node-a", Storage.make(three)) as node:
        target = await node.publish()
        assert await node.output("one", target, "echo kept > /data/f; sync; cat /data/f") == "kept"
        three.daemons.pop("mon.a").end(signal.SIGKILL)
        written = await node.output("one", target, "echo after >> /data/f; sync; wc -l < /data/f")
        assert written == "2"
        await node.runtime.stop("one")
        assert await started(node, "two", target) == "kept\nafter"
        await node.runtime.stop("two")
        await node.node.co.unpublish(IMAGE, target)
        again = await node.publish()
        assert await started(node, "three", again) == "kept\nafter"
