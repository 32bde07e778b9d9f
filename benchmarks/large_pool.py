"""The cost per call with a pool of 2,000 volumes against one of 20, and the start time of its driver.

Two drivers, each a process with its own pool, are called in turn: create, one page of the list, the capacity, delete.
Every image holds a little data. Then each driver is killed and started again.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from benchmarks import figures, inotify, node
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.kata.demo.kubelet import MOUNT
from examples.kata.demo.node import NodePaths
from tests.support.records import pool_layout

NAME = "large-pool"
FEW, MANY = 20, 2000
ROUNDS = 200
WARM_UP = 10
STARTS = 10
CALLERS = 16
PAGE = 10
SIZE_BYTES = 16 << 20
WRITTEN = b"data" * 4096
TIMEOUT_S = 120.0
FLAT, START_S = 2.0, 3.0
CREATE, LIST, CAPACITY, DELETE = "create", f"list, a page of {PAGE}", "capacity", "delete"
START = "kill -9 until it serves"

Times = figures.Collector[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Result:
    """Samples by work and number of volumes."""

    samples: dict[tuple[str, int], figures.Samples]

    def report(self) -> figures.Report:
        """The figures against the goals."""
        flat = (
            figures.at_most(
                f"{work} with {MANY:,} volumes: at most {FLAT:.0f} times that with {FEW}",
                self.samples[work, MANY].median / self.samples[work, FEW].median,
                FLAT,
                "times",
            )
            for work in (CREATE, LIST, CAPACITY, DELETE)
        )
        start = figures.at_most(
            f"{MANY:,} volumes: the driver serves in less than {START_S:.0f} s (99th percentile)",
            self.samples[START, MANY].p99,
            START_S,
            "s",
        )
        return figures.Report(
            name=NAME,
            ways=(f"{FEW} volumes", f"{MANY:,} volumes"),
            title=f"A pool of {MANY:,} volumes",
            method=(
                f"{ROUNDS} rounds with {MANY:,} volumes and with {FEW}, in turn; {STARTS} starts of each. "
                f"Every image has {len(WRITTEN) >> 10} KiB written."
            ),
            rows=tuple(
                figures.Row(_label(work, count), samples, "" if count == FEW else _label(work, FEW))
                for (work, count), samples in sorted(self.samples.items())
            ),
            goals=(*flat, start),
            if_missed="calls of a pool with many volumes take so much longer",
            meaning=(
                "The driver keeps lists and capacity in memory. A start reads every record once."
            ),
        )


@dataclass(frozen=True, slots=True)
class _Pool:
    """A driver and the number of its volumes."""

    paths: NodePaths
    count: int
    controller: "csi_pb2_grpc.ControllerAsyncStub"


async def measure() -> Result:
    """Measure with two pools."""
    times, starts = Times(), Times()
    with node.directories() as few, node.directories() as many:
        counts = ((few, FEW), (many, MANY))
        for paths, count in counts:
            async with _running(paths, count) as pool:
                await _fill(pool)
            _write_into_images(paths)
        async with _running(few, FEW) as one, _running(many, MANY) as other:
            await _rounds((one, other), WARM_UP, Times())
            await _rounds((one, other), ROUNDS, times)
        for _ in range(STARTS):
            for paths, count in counts:
                starts.add((START, count), await _restart(paths))
    return Result(times.samples() | starts.samples("s"))


@contextlib.asynccontextmanager
async def _running(paths: NodePaths, count: int) -> AsyncIterator[_Pool]:
    async with contextlib.AsyncExitStack() as stack:
        process = await node.start(paths, "driver")
        stack.push_async_callback(process.stop)
        await node.wait_until_serving(paths.driver_socket)
        connected = await stack.enter_async_context(channel.connect(paths.driver_socket))
        yield _Pool(paths, count, csi_pb2_grpc.ControllerStub(connected))


async def _fill(pool: _Pool) -> None:
    async def some(first: int) -> None:
        for number in range(first, pool.count, CALLERS):
            await _create(pool, f"volume-{number}")

    await asyncio.gather(*(some(first) for first in range(CALLERS)))


def _write_into_images(paths: NodePaths) -> None:
    for volume_id in pool_layout.images(paths.base / "pool"):
        with pool_layout.image(paths.base / "pool", volume_id).open("r+b") as file:
            file.write(WRITTEN)


async def _rounds(pools: tuple[_Pool, _Pool], count: int, times: Times) -> None:
    for number in range(count):
        for pool in pools if number % 2 else reversed(pools):
            await _round(pool, f"round-{number}", times)


async def _round(pool: _Pool, name: str, times: Times) -> None:
    calls, count = pool.controller, pool.count
    made = await times.timed((CREATE, count), _create(pool, name))
    page = csi_pb2.ListVolumesRequest(max_entries=PAGE)
    await times.timed((LIST, count), calls.ListVolumes(page, timeout=TIMEOUT_S))
    capacity = csi_pb2.GetCapacityRequest()
    await times.timed((CAPACITY, count), calls.GetCapacity(capacity, timeout=TIMEOUT_S))
    delete = csi_pb2.DeleteVolumeRequest(volume_id=made.volume.volume_id)
    await times.timed((DELETE, count), calls.DeleteVolume(delete, timeout=TIMEOUT_S))


async def _create(pool: _Pool, name: str) -> csi_pb2.CreateVolumeResponse:
    return await pool.controller.CreateVolume(
        csi_pb2.CreateVolumeRequest(
            name=name,
            capacity_range=csi_pb2.CapacityRange(required_bytes=SIZE_BYTES),
            volume_capabilities=[MOUNT],
        ),
        timeout=TIMEOUT_S,
    )


async def _restart(paths: NodePaths) -> float:
    """Start a driver, kill it once it serves, and time the start of the next one."""
    first = await node.start(paths, "driver")
    await node.wait_until_serving(paths.driver_socket)
    killed_s = time.monotonic()
    await first.kill()
    with inotify.times_of(os.path.dirname(paths.driver_socket), inotify.CREATED) as bound:
        driver = await node.start(paths, "driver")
        async with asyncio.timeout(node.START_TIMEOUT_S):
            await bound.get()
    try:
        await node.wait_until_serving(paths.driver_socket)
        return time.monotonic() - killed_s
    finally:
        await driver.stop()


def _label(work: str, count: int) -> str:
    return f"{work}, {count:,} volumes"
