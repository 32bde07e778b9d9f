"""What blocks in the proxy has one thread for each volume, and all of it is on the threads that are watched."""

import threading

import grpc
import pytest

from crust.handoff.store import Store
from crust.host.process import workers
from crust.host.process.workers import Workers
from crust.rpc.serving import worker_watch
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import inspect_pb2
from tests.support.faults.refusals import until_probe
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Places

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
