"""The proxy's own health: a socket that was removed, and looks that hang."""

import asyncio
import os
import threading

import grpc
import pytest

from crust.handoff import entry
from crust.handoff.store import Store
from crust.host.process import workers
from crust.host.process.workers import Workers
from crust.inspection import show
from crust.proxy import look
from crust.rpc.serving import server, worker_watch
from crust.wire.v1 import inspect_pb2
from tests.support.co import Co
from tests.support.faults.refusals import refused, until_probe
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places


async def _condition(node: FakeNode) -> inspect_pb2.GetHealthResponse.Condition:
    async with asyncio.timeout(60):
        while True:
            answer = await node.inspect.GetHealth(inspect_pb2.GetHealthRequest())
            if answer.conditions:
                return answer.conditions[0]
            await asyncio.sleep(0.01)


async def test_removed_socket_is_shown_and_fails_the_probe(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CHECK_S", 0.01)
    async with FakeNode(places) as node:
        await node.co.is_ready()
        assert (await show.answer(places.run, show.status)).names == ("handlers",)
        os.unlink(places.sockets.runtime)
        condition = await _condition(node)
        assert condition.component == f"socket {places.sockets.runtime}"
        assert condition.error_name == "SocketLost"
        shown = await show.answer(places.run, show.status)
        assert f"socket {places.sockets.runtime}" in shown.names
        assert "SocketLost" in shown.rendered("table").plain
        await refused(
            node.co.is_ready(),
            grpc.StatusCode.FAILED_PRECONDITION,
            places.sockets.runtime,
            "restart this process",
        )


Code = grpc.StatusCode


class HangingReads:
    """Reads of entries that hang, on threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        self.hung = 0
        self.is_hanging = False
        read = Store.read

        def hang(store: Store, *args: object) -> object:
            if self.is_hanging:
                self.hung += 1
                self.released.wait()
            return read(store, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Store, "read", hang)


async def test_proxy_whose_looks_at_claims_hang_is_unhealthy(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "CHECK_S", 0.01)
    reads, threads = HangingReads(monkeypatch), Workers("the proxy", limit=2)
    async with FakeNode(places, threads=threads) as node, node.handler():
        targets = [places.target(name) for name in ("one", "two")]
        for number, target in enumerate(targets):
            await node.co.publish(f"vol-{number}", target)
        reads.is_hanging = True
        try:
            for number, target in enumerate(targets):
                for _ in range(5):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await Co(node.co.channel, 0.3).stats(f"vol-{number}", target)
                assert reads.hung == number + 1
                if not number:  # a thread is left
                    await Co(node.co.channel).is_ready()
            monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
            await until_probe(node.co.channel, Code.UNAVAILABLE, "[NoWorkerFree] the proxy ")
            health = await node.inspect.GetHealth(inspect_pb2.GetHealthRequest(), timeout=60)
            assert "NoWorkerFree" in [condition.error_name for condition in health.conditions]
            listed = inspect_pb2.ListDeferredVolumesRequest()
            assert len((await node.inspect.ListDeferredVolumes(listed, timeout=60)).volumes) == 2
        finally:
            monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
            reads.released.set()
        await until_probe(node.co.channel, Code.OK)


async def test_look_that_hangs_is_shown_until_it_ends(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "_LATE_S", 0.01)
    goes_on, look_at = threading.Event(), entry.DirectoryReader.look

    def hang(reader: entry.DirectoryReader) -> entry.DirectoryReading:
        assert goes_on.wait(60)
        return look_at(reader)

    async with FakeNode(places) as node:
        with monkeypatch.context() as patched:
            patched.setattr(entry.DirectoryReader, "look", hang)
            try:
                condition = await _condition(node)
                assert condition.component == "looks at the handoff directory"
                assert condition.error_name == "LookHangs"
                await node.co.is_ready()
            finally:
                goes_on.set()
        listed = inspect_pb2.ListDeferredVolumesRequest()
        await node.inspect.ListDeferredVolumes(listed, timeout=60)
        assert not (await node.inspect.GetHealth(inspect_pb2.GetHealthRequest())).conditions
