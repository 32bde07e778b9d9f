"""The cost of a deferred publish against an ordinary one of the same volume, through the same three processes.

The volume is created, staged and formatted once. A round publishes and unpublishes it in each way, and each round
starts with another way: deferred through proxy, shim and driver; as a host mount through the same three; and as a
host mount by the driver alone. Then the same is measured with a busy process on every core.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from benchmarks import figures, node
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.kubelet import Kubelet

NAME = "publish"
ROUNDS = 300
BUSY_ROUNDS = 100
WARM_UP = 10
SIZE_BYTES = 256 << 20
DEFERRED = "deferred, through proxy, shim and driver"
HOST = "mounted on the host, through the same three"
DIRECT = "mounted on the host, by the driver alone"


@dataclass(frozen=True, slots=True)
class Way:
    """One way of publishing."""

    label: str
    co: Kubelet
    defer: bool


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds per way of (publish, unpublish), on an idle machine and on a busy one."""

    idle: tuple[dict[str, figures.Samples], dict[str, figures.Samples]]
    busy: tuple[dict[str, figures.Samples], dict[str, figures.Samples]]

    def report(self) -> figures.Report:
        """The figures against the two goals."""
        deferred, host = self.idle[0][DEFERRED], self.idle[0][HOST]
        return figures.Report(
            name=NAME,
            ways=(DEFERRED, HOST, DIRECT),
            title="Publish and unpublish of one volume",
            method=(
                f"ext4, {SIZE_BYTES >> 20} MiB, a sparse file behind a loop device; {ROUNDS} rounds of every way, "
                f"and {BUSY_ROUNDS} with a busy process per core."
            ),
            rows=(
                *_rows("publish", self.idle[0]),
                *_rows("unpublish", self.idle[1]),
                *_rows("busy: publish", self.busy[0]),
                *_rows("busy: unpublish", self.busy[1]),
            ),
            goals=(
                figures.at_most(
                    "a deferred publish costs no more than an ordinary one through the same three processes",
                    deferred.median / host.median,
                    1.0,
                    "times",
                ),
                figures.at_most(
                    "a deferred publish through three processes takes at most 6 ms",
                    deferred.median,
                    6.0,
                    "ms",
                ),
            ),
            costs=(
                (
                    "a deferred publish through three processes, more than one that mounts on the host",
                    f"{deferred.median - host.median:.2f} ms",
                ),
            ),
            if_missed="a publish is one call of a pod's start, which takes seconds",
            meaning=self._meaning(),
        )

    def _meaning(self) -> str:
        idle, busy = (
            calls[0][DEFERRED].median / calls[0][HOST].median for calls in (self.idle, self.busy)
        )
        return (
            "A deferred publish saves the mount of an empty volume, and adds the checks, the guard mount and the "
            f"durable entry: {idle:.2f} times an ordinary publish on an idle machine, {busy:.2f} times on a busy one."
        )


async def measure() -> Result:
    """Measure on a node of its own."""
    with node.directories() as paths:
        async with (
            node.serving(paths) as co,
            node.caller(paths, paths.driver_socket) as direct,
        ):
            volume = await co.create("bench", SIZE_BYTES)
            await co.stage(volume)
            ways = [
                Way(DEFERRED, co, defer=True),
                Way(HOST, co, defer=False),
                Way(DIRECT, direct, defer=False),
            ]
            await _rounds(ways, volume, WARM_UP)
            idle = await _rounds(ways, volume, ROUNDS)
            async with _busy():
                busy = await _rounds(ways, volume, BUSY_ROUNDS)
            await co.unstage(volume)
            await co.delete(volume)
    return Result(idle, busy)


async def _rounds(
    ways: list[Way], volume: csi_pb2.Volume, count: int
) -> tuple[dict[str, figures.Samples], dict[str, figures.Samples]]:
    """Milliseconds by way: of publish, and of unpublish."""
    target = ways[0].co.target("bench")
    publish, unpublish = figures.Collector[str](), figures.Collector[str]()
    for number in range(count):
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            await publish.timed(way.label, way.co.publish(volume, target, defer=way.defer))
            await unpublish.timed(way.label, way.co.unpublish(volume, target))
    return publish.samples(), unpublish.samples()


@contextlib.asynccontextmanager
async def _busy() -> AsyncIterator[None]:
    """One busy process per core."""
    spin = "while True: pass"
    burners = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", spin)
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            await burner.wait()


def _rows(call: str, ways: dict[str, figures.Samples]) -> tuple[figures.Row, ...]:
    base = f"{call} {HOST}"
    return tuple(
        figures.Row(f"{call} {label}", samples, "" if label == HOST else base)
        for label, samples in ways.items()
    )
