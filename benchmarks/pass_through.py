"""The cost of a hop: pass-through calls, against the same calls made to the driver directly.

The proxy forwards NodeGetCapabilities without parsing it. It parses NodeGetVolumeStats of a volume that is mounted on
the host, finds that the volume is not deferred, and forwards the call unchanged.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio

from benchmarks import figures, node
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

NAME = "passthrough"
ROUNDS = 1500
WARM_UP = 50
DIRECT = "to the driver"
ONE_HOP = "through the proxy"
TWO_HOPS = "through proxy and shim"
GOAL_MS = 1.5

Call = Callable[["csi_pb2_grpc.NodeAsyncStub"], Awaitable[object]]  # in its type stub only
Calls = dict[str, Call]
Times = figures.Collector[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds by call and path."""

    samples: dict[tuple[str, str], figures.Samples]

    def report(self) -> figures.Report:
        """The figures, and the time that each hop adds."""
        return figures.Report(
            name=NAME,
            ways=(DIRECT, ONE_HOP, TWO_HOPS),
            title="Pass-through calls",
            method=f"One call at a time, {ROUNDS} rounds of every call and way, after a warm-up.",
            rows=tuple(
                figures.Row(f"{rpc} {way}", samples, "" if way == DIRECT else f"{rpc} {DIRECT}")
                for (rpc, way), samples in self.samples.items()
            ),
            goals=tuple(
                figures.at_most(
                    f"{rpc} {way}: at most {GOAL_MS} ms more than {DIRECT}",
                    self._more(rpc, way),
                    GOAL_MS,
                    "ms more",
                )
                for rpc, way in self.samples
                if way == ONE_HOP
            ),
            if_missed="a kubelet makes these calls at its start, or once a minute for each volume",
            meaning=(
                "A hop is one process of asyncio and gRPC between two unix sockets. A call on a real node takes "
                f"two hops: they add {self._more('NodeGetCapabilities', TWO_HOPS):.2f} ms together."
            ),
        )

    def _more(self, rpc: str, way: str) -> float:
        return self.samples[rpc, way].median - self.samples[rpc, DIRECT].median


async def measure() -> Result:
    """Measure on a node of its own, with one volume mounted on the host."""
    with node.directories() as paths:
        async with node.serving(paths) as co:
            volume = await co.create("bench", 64 << 20)
            await co.stage(volume)
            target = co.target("bench")
            await co.publish(volume, target, defer=False)
            sockets = {
                DIRECT: paths.driver_socket,
                ONE_HOP: node.one_hop_socket(paths),
                TWO_HOPS: paths.csi_socket,
            }
            times = await _measure(sockets, _calls(volume.volume_id, str(target)))
            await co.unpublish(volume, target)
            await co.unstage(volume)
            await co.delete(volume)
    return Result(times.samples())


def _calls(volume_id: str, target: str) -> Calls:
    capabilities = csi_pb2.NodeGetCapabilitiesRequest()
    stats = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume_id, volume_path=target)
    return {
        "NodeGetCapabilities": lambda stub: stub.NodeGetCapabilities(capabilities, timeout=10),
        "NodeGetVolumeStats": lambda stub: stub.NodeGetVolumeStats(stats, timeout=10),
    }


async def _measure(sockets: dict[str, str], calls: Calls) -> Times:
    channels: dict[str, grpc.aio.Channel] = {
        way: channel.connect(path) for way, path in sockets.items()
    }
    stubs: dict[str, csi_pb2_grpc.NodeAsyncStub] = {
        way: csi_pb2_grpc.NodeStub(connected) for way, connected in channels.items()
    }
    try:
        await _rounds(stubs, calls, WARM_UP)
        return await _rounds(stubs, calls, ROUNDS)
    finally:
        for connected in channels.values():
            await connected.close()


async def _rounds(
    stubs: dict[str, "csi_pb2_grpc.NodeAsyncStub"], calls: Calls, count: int
) -> Times:
    times = Times()
    for _ in range(count):
        for rpc, call in calls.items():
            for way, stub in stubs.items():
                await times.timed((rpc, way), call(stub))
    return times
