"""The time that `crust node` adds to a call, against the bare driver and against proxy, shim and driver as processes.

Three nodes run beside each other, each with a pool of its own: the driver alone, three processes, one process. Each
round makes every call to each of them, in a new order, with a pause of 50 to 200 ms before every call, as a kubelet
calls: without pauses the processes keep one another awake, and a hop looks cheaper than it is.
"""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from benchmarks import figures, machine, node
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.kata.demo.kubelet import Kubelet
from examples.kata.demo.node import HANDLER, NodePaths, Process

NAME = "one-process"
ROUNDS = 50
STARTS = 5
POLLS = 200
SIZE_BYTES = 256 << 20
DRIVER = "driver alone"
PARTS = "three processes"
NODE = "crust node"
WAYS = (DRIVER, PARTS, NODE)
PUBLISH, DEFERRED = "NodePublishVolume", "deferred NodePublishVolume"
PAUSE_S = (0.05, 0.2)

W = TypeVar("W", bound="Way")


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds by call and way, and the cost of the process itself."""

    calls: dict[tuple[str, str], figures.Samples]
    starts: figures.Samples
    resident: figures.Samples
    resident_parts: figures.Samples
    polling: figures.Samples

    def report(self) -> figures.Report:
        """The figures, and the goals."""
        rpcs = [rpc for rpc, way in self.calls if way == DRIVER]
        parts = [rpc for rpc, way in self.calls if way == NODE]
        added = {rpc: self._median(rpc, NODE) - self._median(rpc, DRIVER) for rpc in rpcs}
        worst = max(added, key=lambda rpc: added[rpc])
        deferred = self._median(DEFERRED, NODE) / self._median(PUBLISH, DRIVER)
        return figures.Report(
            name=NAME,
            title="One process or three",
            method=(
                f"{ROUNDS} rounds of every call and way, each after a pause of 50 to 200 ms; ext4, "
                f"{SIZE_BYTES >> 20} MiB; {STARTS} starts, compiled to byte code; {POLLS} polls for statistics."
            ),
            rows=(
                *(
                    figures.Row(
                        f"{rpc}, {way}",
                        self.calls[rpc, way],
                        "" if way == DRIVER else f"{rpc if rpc in rpcs else PUBLISH}, {DRIVER}",
                    )
                    for rpc in parts
                    for way in WAYS
                    if (rpc, way) in self.calls
                ),
                figures.Row("start until a Probe is answered, crust node", self.starts),
                figures.Row("resident memory, crust node", self.resident),
                figures.Row("resident memory, three processes", self.resident_parts),
                figures.Row("200 volumes polled each minute, of a core, crust node", self.polling),
            ),
            goals=(
                figures.at_most(
                    f"crust node adds at most 0.5 ms to any call over the driver alone (most: {worst})",
                    added[worst],
                    0.5,
                    "ms more",
                ),
                figures.at_most(
                    "a deferred publish takes at most 0.7 times the driver's own host publish",
                    deferred,
                    0.7,
                    "times",
                ),
                figures.at_most("it serves 0.6 s after its start", self.starts.median, 0.6, "s"),
                figures.at_most("resident memory below 90 MiB", self.resident.median, 90, "MiB"),
                figures.at_most(
                    "200 volumes polled each minute below 2 % of a core",
                    self.polling.median,
                    2,
                    "%",
                ),
            ),
            costs=(
                ("memory of `crust node`", f"{self.resident.median:.0f} MiB"),
                (
                    "memory of driver, shim and proxy as three processes",
                    f"{self.resident_parts.median:.0f} MiB",
                ),
                ("from its start until it serves", f"{self.starts.median:.2f} s"),
                (
                    "200 volumes whose statistics are polled each minute",
                    f"{self.polling.median:.2f} % of a core",
                ),
            ),
            if_missed="a call is one of a few in a pod's start, which takes seconds; the rest are costs of a node",
            meaning="",
            ways=WAYS,
        )

    def _median(self, rpc: str, way: str) -> float:
        return self.calls[rpc, way].median


@dataclass(frozen=True, slots=True)
class Way:
    """A node that is called, and how."""

    name: str
    co: Kubelet
    connected: grpc.aio.Channel


@dataclass(frozen=True, slots=True)
class _Way(Way):
    paths: NodePaths
    volume: csi_pb2.Volume


async def measure() -> Result:
    """Measure on three nodes of their own."""
    with contextlib.ExitStack() as made:
        paths = {way: made.enter_context(node.directories()) for way in WAYS}
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            bare = await enter(node.driver(paths[DRIVER]))
            parts, pids = await enter(node.serving_with_pids(paths[PARTS]))
            one, process = await enter(_node(paths[NODE]))
            sockets = {
                DRIVER: paths[DRIVER].driver_socket,
                PARTS: paths[PARTS].csi_socket,
                NODE: paths[NODE].csi_socket,
            }
            ways = []
            for name, co in zip(WAYS, (bare, parts, one), strict=True):
                connected = await enter(channel.connect(sockets[name]))
                volume = await co.create("bench", SIZE_BYTES)
                await co.stage(volume)
                ways.append(_Way(name, co, connected, paths[name], volume))
            times = await timed(ways, _CALLS, ROUNDS)
            polling = await _polling(ways[-1], process.running.pid)
            resident = [_resident_mib(process.running.pid)]
            resident_parts = [sum(_resident_mib(pid) for pid in pids)]
            for way in ways:
                await way.co.unstage(way.volume)
                await way.co.delete(way.volume)
        starts = [await _start(paths[NODE]) for _ in range(STARTS)]
    return Result(
        times.samples(),
        figures.Samples.of("s", starts),
        figures.Samples.of("MiB", resident),
        figures.Samples.of("MiB", resident_parts),
        figures.Samples.of("%", [polling]),
    )


async def timed(
    ways: list[W], calls: Mapping[str, Callable[[W], Awaitable[object]]], rounds: int
) -> figures.Collector[tuple[str, str]]:
    """The times of every call to each way, in rounds of a random order; three more rounds, before, are not counted.

    A driver alone defers nothing.
    """
    warm_up = 3
    times = figures.Collector[tuple[str, str]]()
    for number in range(warm_up + rounds):
        counted = times if number >= warm_up else figures.Collector()
        for rpc, call in calls.items():
            for way in random.sample(ways, len(ways)):
                if "deferred" in rpc and way.name == DRIVER:
                    continue
                await asyncio.sleep(random.uniform(*PAUSE_S))
                await counted.timed((rpc, way.name), call(way))
    return times


def _target(way: _Way, pod: str) -> str:
    return str(way.co.target(pod))


def probe(way: Way) -> Awaitable[object]:
    """Identity's Probe."""
    stub: csi_pb2_grpc.IdentityAsyncStub = csi_pb2_grpc.IdentityStub(way.connected)
    return stub.Probe(csi_pb2.ProbeRequest(), timeout=30)


def capabilities(way: Way) -> Awaitable[object]:
    """NodeGetCapabilities."""
    stub: csi_pb2_grpc.NodeAsyncStub = csi_pb2_grpc.NodeStub(way.connected)
    return stub.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest(), timeout=30)


def _stats(way: _Way) -> Awaitable[object]:
    stub: csi_pb2_grpc.NodeAsyncStub = csi_pb2_grpc.NodeStub(way.connected)
    request = csi_pb2.NodeGetVolumeStatsRequest(
        volume_id=way.volume.volume_id, volume_path=_target(way, "host")
    )
    return stub.NodeGetVolumeStats(request, timeout=30)


def _controller_capabilities(way: _Way) -> Awaitable[object]:
    stub: csi_pb2_grpc.ControllerAsyncStub = csi_pb2_grpc.ControllerStub(way.connected)
    return stub.ControllerGetCapabilities(csi_pb2.ControllerGetCapabilitiesRequest(), timeout=30)


_CALLS: dict[str, Callable[[_Way], Awaitable[object]]] = {
    "Probe": probe,
    "NodeGetCapabilities": capabilities,
    "ControllerGetCapabilities": _controller_capabilities,
    PUBLISH: lambda way: way.co.publish(way.volume, way.co.target("host"), defer=False),
    "NodeGetVolumeStats": _stats,
    "NodeUnpublishVolume": lambda way: way.co.unpublish(way.volume, way.co.target("host")),
    "NodeUnstageVolume": lambda way: way.co.unstage(way.volume),
    "NodeStageVolume": lambda way: way.co.stage(way.volume),
    DEFERRED: lambda way: way.co.publish(way.volume, way.co.target("guest"), defer=True),
    "deferred NodeUnpublishVolume": lambda way: way.co.unpublish(
        way.volume, way.co.target("guest")
    ),
}


@contextlib.asynccontextmanager
async def _node(paths: NodePaths) -> AsyncIterator[tuple[Kubelet, Process]]:
    async with contextlib.AsyncExitStack() as stack:
        process = await node.start(paths, "node")
        stack.push_async_callback(process.stop)
        await stack.enter_async_context(node.registered(paths))
        co = await stack.enter_async_context(node.caller(paths, paths.csi_socket))
        await co.wait_ready(HANDLER)
        yield co, process


async def _polling(way: _Way, pid: int) -> float:
    """The share of a core, in per cent, for a kubelet's calls about 200 volumes in a minute."""
    await way.co.publish(way.volume, way.co.target("host"), defer=False)
    before_s = machine.processor_s(pid)
    began_s = time.monotonic()
    for _ in range(POLLS):
        await capabilities(way)
        await _stats(way)
        await asyncio.sleep(0.02)
    busy_s, elapsed_s = machine.processor_s(pid) - before_s, time.monotonic() - began_s
    before_s = machine.processor_s(pid)
    await asyncio.sleep(elapsed_s)
    idle_s = machine.processor_s(pid) - before_s
    await way.co.unpublish(way.volume, way.co.target("host"))
    return (busy_s - idle_s) / 60 * 100 + idle_s / elapsed_s * 100


async def _start(paths: NodePaths) -> float:
    """Seconds from the start of the process to its first answer."""
    began_s = time.monotonic()
    process = await node.start(paths, "node")
    try:
        await asyncio.to_thread(_wait_for_listener, paths.csi_socket)
        await node.wait_until_serving(paths.csi_socket)
        return time.monotonic() - began_s
    finally:
        await process.stop()


def _wait_for_listener(path: str) -> None:
    while True:
        with socket.socket(socket.AF_UNIX) as one:
            if one.connect_ex(path) == 0:
                return
        time.sleep(0.005)


def _resident_mib(pid: int) -> float:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
