"""The calls of a tenant beside another one that wants to stop the node, against their quiet time.

One `crust node`, its pool on xfs, which shares blocks. For each attack the tenant's calls are measured quiet and
beside it, in turn. The hostile tenant retries without end: half a second after each answer, as a kubelet does at
first. The attack goes on while the node is stopped. Its numbers are those of proofs of the faults, made smaller.
"""

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from benchmarks import figures, node, snapshots
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.kubelet import Kubelet, capability
from examples.kata.demo.node import HANDLER, NodePaths, Process
from tests.support.drivers import hostile_ext4
from tests.support.records import pool_layout

NAME = "one-tenant"
ROUNDS = 30
WARM_UP = 5
RETRY_S = 0.5
PAUSE_S = (0.02, 0.1)
VOLUMES = 8
SIZE_BYTES, LARGE_BYTES = 64 << 20, 2048 << 20
LEVELS, LINKS = 7, 25
BLOCKS = 400_000
PARTS, BLOCK_BYTES = 100_000, 4096
LISTERS = 2
STRANGER, PROCESSES, FILES = 65534, 8, 19_900
GROUPED = capability(group="3000", policy="Always")
QUIET = "quiet"
TWICE, STOP_S, MEMORY_MIB = 2.0, 10.0, 200.0
STOP, MEMORY = "stop", "memory"

_FLOOD = """
import os, resource, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2)
fd = os.open("/dev/zero", os.O_RDONLY)
for _ in range(int(sys.argv[2])):
    os.dup(fd)
print(flush=True)
sys.stdin.read()
"""
_LISTS = """
import sys, time, grpc
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
wanted = csi_pb2.GetMetadataAllocatedRequest(snapshot_id=sys.argv[2])
stub = csi_pb2_grpc.SnapshotMetadataStub(grpc.insecure_channel(sys.argv[1], options=channel.OPTIONS))
while True:
    try:
        for _ in stub.GetMetadataAllocated(wanted, timeout=300):
            pass
        print(flush=True)
    except grpc.RpcError:
        pass
    time.sleep(0.5)
"""


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds by attack and call; seconds of the stop and MiB of the largest resident memory, by attack."""

    calls: dict[tuple[str, str], figures.Samples]
    stops: dict[str, figures.Samples]
    memory: dict[str, figures.Samples]

    def report(self) -> figures.Report:
        """The figures against the goals."""
        attacks = dict.fromkeys(attack for attack, _ in self.calls if attack != QUIET)
        return figures.Report(
            name=NAME,
            title="A tenant beside one that wants to stop the node",
            method=(
                f"{ROUNDS} rounds of each call, quiet and beside each attack, by `crust node` with a pool on xfs. "
                f"The hostile tenant has {VOLUMES} volumes, and retries each {RETRY_S:g} s after an answer."
            ),
            rows=tuple(self._rows()),
            goals=(
                *map(self._goal, attacks),
                figures.at_most(
                    "a stop beside a hostile tenant takes at most 10 s",
                    max(samples.p99 for samples in self.stops.values()),
                    STOP_S,
                    "s",
                ),
                figures.at_most(
                    "memory beside a hostile tenant stays below 200 MiB",
                    max(samples.p99 for samples in self.memory.values()),
                    MEMORY_MIB,
                    "MiB",
                ),
            ),
            if_missed="pods of other tenants start and end so much later; a kubelet waits two minutes for a call",
            meaning=(
                "Walks for fsGroup, and reads of block lists, run one step at a time. A look at the open files of "
                "all processes, which a publish on the host and each deferred call needs, takes 7 us of processor "
                "time for each descriptor, and 2 s at most. What is left is the processor: the kernel's part of "
                "mounts, unmounts and copies shares two cores with the hostile work."
            ),
            ways=(*_CALLS, STOP, MEMORY),
        )

    def _goal(self, attack: str) -> figures.Goal:
        ratios = {
            call: self.calls[attack, call].median / self.calls[QUIET, call].median
            for call in _CALLS
        }
        most = max(ratios, key=lambda call: ratios[call])
        return figures.at_most(
            f"beside {attack} each call of another tenant takes at most twice its quiet time (most: {most})",
            ratios[most],
            TWICE,
            "times",
        )

    def _rows(self) -> list[figures.Row]:
        rows = [
            figures.Row(f"{attack}: {call}", samples, "" if attack == QUIET else f"{QUIET}: {call}")
            for (attack, call), samples in self.calls.items()
        ]
        for way, by_attack in ((STOP, self.stops), (MEMORY, self.memory)):
            rows += [
                figures.Row(f"{attack}: {way}", samples) for attack, samples in by_attack.items()
            ]
        return rows


@dataclass(frozen=True, slots=True)
class _Node:
    """A node that serves, the kubelet of both tenants, and a volume of the one who is measured."""

    paths: NodePaths
    process: Process
    co: Kubelet
    volume: csi_pb2.Volume

    def target(self, pod: str = "tenant") -> Path:
        return self.co.target(pod)


Call = Callable[[_Node], Awaitable[object]]
_CALLS: Mapping[str, Call] = {
    "publish with fsGroup": lambda on: on.co.publish(
        on.volume, on.target(), defer=False, capability=GROUPED
    ),
    "statistics": lambda on: on.co.stats(on.volume, on.target()),
    "unpublish": lambda on: on.co.unpublish(on.volume, on.target()),
    "deferred publish": lambda on: on.co.publish(on.volume, on.target("guest"), defer=True),
    "deferred unpublish": lambda on: on.co.unpublish(on.volume, on.target("guest")),
}
Attack = Callable[[_Node], "contextlib.AbstractAsyncContextManager[None]"]


async def measure() -> Result:
    """Measure with a node for each attack."""
    calls, stops, memory = (
        figures.Collector[tuple[str, str]](),
        figures.Collector[str](),
        figures.Collector[str](),
    )
    for name, attack in _ATTACKS.items():
        with node.directories() as paths, snapshots.filesystem(paths, "xfs"):
            async with _serving(paths) as on:
                await _rounds(on, WARM_UP, QUIET, figures.Collector())
                await _rounds(on, ROUNDS, QUIET, calls)
                memory.add(QUIET, _highest_mib(on.process))
                async with attack(on):
                    await _rounds(on, ROUNDS, name, calls)
                    memory.add(name, _highest_mib(on.process))
                    began_s = time.monotonic()
                    await on.process.stop()
                    stops.add(name, time.monotonic() - began_s)
    return Result(calls.samples(), stops.samples("s"), memory.samples("MiB"))


async def _rounds(
    on: _Node, count: int, attack: str, times: figures.Collector[tuple[str, str]]
) -> None:
    for _ in range(count):
        for name, call in _CALLS.items():
            await asyncio.sleep(random.uniform(*PAUSE_S))
            await times.timed((attack, name), call(on))


@contextlib.asynccontextmanager
async def _serving(paths: NodePaths) -> AsyncIterator[_Node]:
    async with contextlib.AsyncExitStack() as stack:
        process = await node.start(paths, "node")
        stack.push_async_callback(process.stop)
        await stack.enter_async_context(node.registered(paths))
        co = await stack.enter_async_context(node.caller(paths, paths.csi_socket))
        await co.wait_ready(HANDLER)
        volume = await co.create("tenant", SIZE_BYTES)
        await co.stage(volume)
        yield _Node(paths, process, co, volume)


@contextlib.asynccontextmanager
async def _for_ever(*calls: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Each call is made again and again during the block, whatever its answer is; each has been made once before."""
    begun = [asyncio.Event() for _ in calls]

    async def retry(call: Callable[[], Awaitable[object]], is_begun: asyncio.Event) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await asyncio.wait([one := asyncio.ensure_future(call())], timeout=RETRY_S)
                is_begun.set()
                await one
            await asyncio.sleep(RETRY_S)

    running = [asyncio.create_task(retry(*one)) for one in zip(calls, begun, strict=True)]
    try:
        await asyncio.gather(*(one.wait() for one in begun))
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


@contextlib.asynccontextmanager
async def _tree(on: _Node, size_bytes: int, write: Callable[[Path], None]) -> AsyncIterator[None]:
    """Volumes of which the tenant has written an ext4 of his own, and their pods with fsGroup."""
    volumes = [await on.co.create(f"hostile-{number}", size_bytes) for number in range(VOLUMES)]
    for volume in volumes:
        await on.co.stage(volume)
        await on.co.unstage(volume)
        write(pool_layout.image(on.paths.base / "pool", volume.volume_id))
        await on.co.stage(volume)

    def publish(volume: csi_pb2.Volume) -> Awaitable[object]:
        target = on.target(volume.volume_id)
        return on.co.publish(volume, target, defer=False, capability=GROUPED)

    async with _for_ever(*(lambda volume=volume: publish(volume) for volume in volumes)):
        yield


@contextlib.asynccontextmanager
async def _fragments(on: _Node) -> AsyncIterator[None]:
    """A volume of which every second block is written, its snapshots, and lists of their blocks."""
    volume = await on.co.create("hostile", LARGE_BYTES, snapshots.BLOCK)
    with pool_layout.image(on.paths.base / "pool", volume.volume_id).open("r+b") as file:
        for number in range(PARTS):
            os.pwrite(file.fileno(), b"x" * BLOCK_BYTES, 2 * BLOCK_BYTES * number)
        os.fsync(file.fileno())
    first = await on.co.snapshot(volume, "first")

    async def snapshot() -> None:
        await on.co.delete_snapshot(await on.co.snapshot(volume, "next"))

    argv = (sys.executable, "-c", _LISTS, channel.target_of(on.paths.csi_socket), first)
    async with _beside(argv, LISTERS), _for_ever(snapshot):
        yield


@contextlib.asynccontextmanager
async def _descriptors(on: _Node) -> AsyncIterator[None]:
    """Processes of an unprivileged user with as many descriptors as one may have."""
    argv = (sys.executable, "-IS", "-c", _FLOOD, str(STRANGER), str(FILES))
    async with _beside(argv, PROCESSES):
        yield


@contextlib.asynccontextmanager
async def _beside(argv: tuple[str, ...], count: int) -> AsyncIterator[None]:
    """Processes that have printed a line, and live during the block."""
    pipe = asyncio.subprocess.PIPE
    started = [
        await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe) for _ in range(count)
    ]
    try:
        for one in started:
            assert one.stdout is not None
            assert await one.stdout.readline()
        yield
    finally:
        for one in started:
            one.kill()
            await one.wait()


_ATTACKS: Mapping[str, Attack] = {
    "directories with many names": lambda on: _tree(
        on, SIZE_BYTES, lambda image: hostile_ext4.link_directories(image, LEVELS, LINKS)
    ),
    "one directory of 6 million names": lambda on: _tree(
        on, LARGE_BYTES, lambda image: hostile_ext4.repeat_block(image, BLOCKS)
    ),
    "an image in 100,000 parts": _fragments,
    "159,200 descriptors of 8 processes": _descriptors,
}


def _highest_mib(process: Process) -> float:
    with open(f"/proc/{process.running.pid}/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
