"""The proxy's own health: problems fail a Probe, and all that blocks is on watched threads."""

import asyncio
import os
import threading

import grpc
import pytest

from crust.cli.inspecting import show
from crust.handoff.store import Store
from crust.host.process import workers
from crust.host.process.workers import Workers
from crust.rpc.serving import server, worker_watch
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import inspect_pb2
from tests.support.faults.refusals import refused, until_probe
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Node, Places


async def _condition(node: Node) -> inspect_pb2.GetHealthResponse.Condition:
    async with asyncio.timeout(60):
        while True:
            answer = await node.inspect.GetHealth(inspect_pb2.GetHealthRequest())
            if answer.conditions:
                return answer.conditions[0]
            await asyncio.sleep(0.01)


async def test_a_socket_that_was_removed_is_shown_and_fails_the_probe(
    places: nodes.Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CHECK_S", 0.01)
    async with nodes.running(places) as node:
        identity: csi_pb2_grpc.IdentityAsyncStub = csi_pb2_grpc.IdentityStub(node.co.channel)
        await identity.Probe(csi_pb2.ProbeRequest(), timeout=10)
        assert (await show.answer(places.run, show.status)).names == ("handlers",)
        os.unlink(places.sockets.runtime)
        found = await _condition(node)
        assert found.part == f"socket {places.sockets.runtime}"
        assert found.error_name == "SocketLost"
        shown = await show.answer(places.run, show.status)
        assert f"socket {places.sockets.runtime}" in shown.names
        assert "SocketLost" in shown.rendered("table").plain
        await refused(
            identity.Probe(csi_pb2.ProbeRequest(), timeout=10),
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


async def test_hanging_look_at_a_claim_takes_one_thread_and_the_proxy_without_threads_is_unhealthy(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "CHECK_S", 0.01)
    reads, threads = HangingReads(monkeypatch), Workers("the proxy", limit=2)
    async with nodes.running(places, threads=threads) as node, node.handler():
        targets = [places.target(name) for name in ("one", "two")]
        for number, target in enumerate(targets):
            await node.co.publish(f"vol-{number}", target)
        reads.is_hanging = True
        try:
            for number, target in enumerate(targets):
                stats = csi_pb2.NodeGetVolumeStatsRequest(
                    volume_id=f"vol-{number}", volume_path=target
                )
                for _ in range(5):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await node.co.node.NodeGetVolumeStats(stats, timeout=0.3)
                assert reads.hung == number + 1
                if not number:  # a thread is left
                    await csi_pb2_grpc.IdentityStub(node.co.channel).Probe(
                        csi_pb2.ProbeRequest(), timeout=60
                    )
            monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
            await until_probe(node.co.channel, Code.UNAVAILABLE, "[NoWorkerFree] the proxy ")
            health = await node.inspect.GetHealth(inspect_pb2.GetHealthRequest(), timeout=60)
            assert "NoWorkerFree" in [each.error_name for each in health.conditions]
            listed = inspect_pb2.ListDeferredVolumesRequest()
            assert len((await node.inspect.ListDeferredVolumes(listed, timeout=60)).volumes) == 2
        finally:
            monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
            reads.released.set()
        await until_probe(node.co.channel, Code.OK)
