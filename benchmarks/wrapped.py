"""The time that crust adds to the calls of a wrapped driver: as proxy and shim in processes, and as `crust node`.

The driver is examples/drivers/cloud.py, which knows nothing of deferral and runs in a process of its own in each of
three nodes. Rounds and pauses are those of `one_process`. The driver alone cannot defer, so deferred calls are only
compared with each other.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import figures, node, one_process
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from examples.drivers import cloud
from examples.kata.demo.node import HANDLER, NodePaths, Process

NAME = "wrapped"
ROUNDS = 50
SIZE_BYTES = 64 << 20
DRIVER, PARTS, NODE = one_process.DRIVER, "proxy and shim", "crust node"
WAYS = (DRIVER, PARTS, NODE)
_DEFERRED = {"crust.dev/defer": "always", "crust.dev/runtime-handler": HANDLER}


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds by call and way."""

    calls: dict[tuple[str, str], figures.Samples]

    def report(self) -> figures.Report:
        """The figures, and the goal."""
        rpcs = [rpc for rpc, way in self.calls if way == NODE]
        compared = [rpc for rpc in dict.fromkeys(rpcs) if (rpc, DRIVER) in self.calls]
        added = {way: [self._added(rpc, way) for rpc in compared] for way in (PARTS, NODE)}
        return figures.Report(
            name=NAME,
            title="Around a driver that is wrapped",
            method=(
                f"{ROUNDS} rounds of every call and way, each after a pause of 50 to 200 ms; the driver is a process "
                "of its own and calls mount(8)."
            ),
            rows=tuple(
                figures.Row(
                    f"{rpc}, {way}",
                    self.calls[rpc, way],
                    self._against(rpc, way),
                    is_other=way == DRIVER,
                )
                for rpc in dict.fromkeys(rpcs)
                for way in WAYS
                if (rpc, way) in self.calls
            ),
            goals=(
                figures.at_most(
                    "crust node adds at most half of what proxy and shim add, over all calls",
                    sum(added[NODE]) / sum(added[PARTS]),
                    0.5,
                    "times",
                ),
            ),
            if_missed="these calls are a few in a pod's start, which takes seconds",
            meaning="",
            ways=WAYS,
        )

    def _added(self, rpc: str, way: str) -> float:
        return self.calls[rpc, way].median - self.calls[rpc, DRIVER].median

    def _against(self, rpc: str, way: str) -> str:
        base = DRIVER if (rpc, DRIVER) in self.calls else PARTS
        return "" if way == base else f"{rpc}, {base}"


@dataclass(frozen=True, slots=True)
class _Way(one_process.Way):
    host: csi_pb2.Volume
    guest: csi_pb2.Volume


async def measure() -> Result:
    """Measure on three nodes of their own."""
    async with contextlib.AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(_way(name)) for name in WAYS]
        times = await one_process.timed(ways, _CALLS, ROUNDS)
    return Result(times.samples())


def _publish(way: _Way) -> Awaitable[object]:
    return way.co.publish(way.host, way.co.target("host"), defer=False)


def _unpublish(way: _Way) -> Awaitable[object]:
    return way.co.unpublish(way.host, way.co.target("host"))


_CALLS: dict[str, Callable[[_Way], Awaitable[object]]] = {
    "Probe": one_process.probe,
    "NodeGetCapabilities": one_process.capabilities,
    "NodePublishVolume": _publish,
    "NodeGetVolumeStats": lambda way: way.co.stats(way.host, way.co.target("host")),
    "NodeUnpublishVolume": _unpublish,
    "deferred NodePublishVolume": lambda way: way.co.publish(
        way.guest, way.co.target("guest"), defer=False
    ),
    "deferred NodeUnpublishVolume": lambda way: way.co.unpublish(way.guest, way.co.target("guest")),
}


@contextlib.asynccontextmanager
async def _way(name: str) -> AsyncIterator[_Way]:
    """The driver, the parts around it, and two staged volumes: for the host, and for a guest."""
    async with contextlib.AsyncExitStack() as stack:
        made = stack.enter_context(node.directories())
        paths = replace(made, driver=cloud.NAME)
        await stack.enter_async_context(_driver(paths))
        socket = paths.driver_socket if name == DRIVER else paths.csi_socket
        for program in {DRIVER: (), PARTS: ("shim", "proxy"), NODE: ("node",)}[name]:
            stack.push_async_callback((await node.start(paths, program)).stop)
        if name != DRIVER:
            await stack.enter_async_context(node.registered(paths))
        await node.wait_until_serving(socket)
        co = await stack.enter_async_context(node.caller(paths, socket))
        co.attaches, co.secrets = True, {"token": cloud.TOKEN}
        if name != DRIVER:
            await co.wait_ready(HANDLER)
        connected = await stack.enter_async_context(channel.connect(socket))
        host, guest = [await co.create(kind, SIZE_BYTES) for kind in ("host", "guest")]
        guest.volume_context.update(_DEFERRED)
        await co.stage(host)
        await co.stage(guest)
        yield _Way(name, co, connected, host, guest)
        await co.unstage(guest)
        await co.unstage(host)


@contextlib.asynccontextmanager
async def _driver(paths: NodePaths) -> AsyncIterator[None]:
    Path(paths.driver_socket).parent.mkdir(parents=True)
    state_dir = paths.base / "cloud"
    state_dir.mkdir()
    process = await Process.start(
        paths.logs / "driver.log",
        "examples.drivers.cloud",
        f"--socket={paths.driver_socket}",
        f"--state-dir={state_dir}",
        "--node-id=bench",
    )
    try:
        await node.wait_until_serving(paths.driver_socket)
        yield
    finally:
        await process.stop()
