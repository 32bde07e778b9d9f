"""The cost of `crust kata` on a node with 250 published volumes: each container, the create with a volume, and rest.

The daemon is a process of its own. The container engine is a stand-in in this process, which calls it by containerd's
protocol, one call after the other; virtual machines are processes that have the sandbox's id among their arguments.
The volumes are valid records of devices that do not exist, but for ten loop devices, whose files are on a disk, as in
our driver's pool; each sandbox claims them after the end of the one before.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import figures, machine, records
from benchmarks import node as nodes
from crust.core import volumes
from crust.handoff import claims
from crust.handoff.store import Store
from crust.host.block import loop
from crust.kata.entry import KataEntries, Placeholders
from crust.wire.nri.v1alpha1 import nri_pb2
from crust_conformance.runtimes import testing
from examples.kata.demo.node import HANDLER, Process
from tests.support.kata import engine as engines
from tests.support.kata import sandbox

NAME = "kata"
VOLUMES = 250
PLAIN_ROUNDS, CREATES, RESTORES, ENDS = 500, 20, 10, 20
REST_S = 20.0
CALL = "a call of the engine that asks nothing"
PLAIN = "CreateContainer without a deferred volume"
CREATE = "CreateContainer and its validation, with one"
MANY = 10
CREATE_MANY = f"the same, with {MANY} of one container"
MORE_MS = 2.0
"""For each volume beside the first."""
RESTORE = f"{VOLUMES} placeholders, made again"
BACK = "from the end of the engine's connection to the plugin's registration"
AGAIN = "from the start of an engine that was away to the plugin's registration"
BACK_MS = 200.0
REST = "at rest, of a core"
MEMORY = {
    "Anonymous": "memory of its own, without the files of programs and libraries",
    "Pss": "the same, and its share of those files",
    "Rss": "the same, and all of those files",
}
"""By the kernel's word in smaps_rollup; all are read at once."""

Measured = figures.Collector[str]


@dataclass(frozen=True, slots=True)
class Result:
    """Samples by label."""

    samples: dict[str, figures.Samples]

    def report(self) -> figures.Report:
        """The figures against the goals."""
        of = {label: samples.median for label, samples in self.samples.items()}
        own = of[MEMORY["Anonymous"]]
        return figures.Report(
            name=NAME,
            title=f"`crust kata` with {VOLUMES} volumes",
            method=f"{PLAIN_ROUNDS} calls without a volume, which has four mounts, in turn with calls that ask "
            f"nothing; {CREATES} sandboxes with one, in turn with as many with {MANY}, each with its keeper; "
            f"{RESTORES} restores; {ENDS} ends of the connection, and as many of the engine; {REST_S:g} s at rest.",
            rows=tuple(
                figures.Row(label, samples, CALL if label == PLAIN else "")
                for label, samples in self.samples.items()
            ),
            goals=(
                figures.at_most("a container without a deferred volume: 1 ms", of[PLAIN], 1, "ms"),
                figures.at_most("a create with one: 150 ms", of[CREATE], 150, "ms"),
                figures.at_most(
                    f"a create with {MANY}: that of one, and {MORE_MS:g} ms for each other",
                    of[CREATE_MANY],
                    of[CREATE] + MORE_MS * (MANY - 1),
                    "ms",
                ),
                figures.at_most(f"{VOLUMES} entries restored: 1 s", of[RESTORE], 1000, "ms"),
                *(
                    figures.at_most(
                        f"{label}: {BACK_MS:g} ms", self.samples[label].p99, BACK_MS, "ms"
                    )
                    for label in (BACK, AGAIN)
                ),
                figures.at_most("`crust kata` at rest: 0.2 % of a core", of[REST], 0.2, "%"),
                figures.at_most("`crust kata`: 40 MiB beside the keepers", own, 40, "MiB"),
            ),
            costs=(
                (
                    f"with Kata: memory of `crust kata` beside {VOLUMES} volumes",
                    f"{of[MEMORY['Rss']]:.0f} MiB",
                ),
                ("with Kata: `crust kata` at rest", f"{of[REST]:.2f} % of a core"),
                (
                    "with Kata: each container that has no deferred volume waits",
                    f"{of[PLAIN]:.2f} ms",
                ),
            ),
            if_missed="calls are a small part of a virtual machine's start; rest and memory are costs of a node",
            meaning="Every container of the node waits for a call without a deferred volume.",
        )


@dataclass(frozen=True, slots=True)
class _Node:
    directory: Path
    engine: engines.Engine
    proxy: testing.FakeProxy
    entries: KataEntries
    daemon: int


async def measure() -> Result:
    """Measure on a tmpfs, as /run is on a node."""
    measured = Measured()
    with nodes.run_directory() as directory:
        _restored(directory, measured)
        async with _node(directory) as node:
            await _plain(node, measured)
            await _creates(node, measured)
            await _ends(node, measured)
            async with engines.serving(f"{directory}/nri.sock", engines.Engine()) as engine:
                await engine.registered.wait()
                rest = await _at_rest(node.daemon)
    return Result({**measured.samples(), **rest})


def _restored(directory: Path, measured: Measured) -> None:
    """In this process: the work of a daemon that starts, before it takes the engine's calls."""
    store = Store(f"{directory}/volumes")
    store.open()
    for number in range(VOLUMES):
        store.write(records.record(number))
    entries = KataEntries(f"{directory}/direct-volumes")
    handlers = [volumes.HandlerName(HANDLER)]
    for _ in range(RESTORES):
        shutil.rmtree(entries.root, ignore_errors=True)
        entries.open()
        began_s = time.perf_counter()
        Placeholders(store, entries, handlers, lambda *_: None).look_at_volumes()
        measured.add(RESTORE, 1000 * (time.perf_counter() - began_s))
    assert len(entries.names()) == VOLUMES


@asynccontextmanager
async def _node(directory: Path) -> AsyncIterator[_Node]:
    (directory / "sbs").mkdir()
    (directory / "kata.toml").write_text(
        "[hypervisor.clh]\ndisable_block_device_use = false\nblock_device_driver = 'virtio-blk'\n"
    )
    (directory / "crust.toml").write_text(
        f'run_dir = "{directory}"\nvolumes_root = "{directory}/volumes"\n'
        f'handlers_socket = "{directory}/handlers.sock"\nnri_socket = "{directory}/nri.sock"\n'
        f'kata_volumes = "{directory}/direct-volumes"\nkata_sandboxes = "{directory}/sbs"\n'
        f'[[runtimes]]\nname = "{HANDLER}"\nconfiguration = "{directory}/kata.toml"\n'
    )
    engine = engines.Engine(timeout_s=20)
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(testing.serving(str(directory)))
        await stack.enter_async_context(engines.serving(f"{directory}/nri.sock", engine))
        config = f"--config={directory}/crust.toml"
        daemon = await Process.start(directory / "kata.log", "crust", "kata", config)
        stack.push_async_callback(daemon.stop)
        await proxy.registered(HANDLER)
        yield _Node(
            directory, engine, proxy, KataEntries(f"{directory}/direct-volumes"), daemon.running.pid
        )


async def _plain(node: _Node, measured: Measured) -> None:
    mounts = [("/etc/hosts", "/etc/hosts"), ("/proc", "/proc"), ("/etc", "/c"), ("/tmp", "/tmp")]
    asked = nri_pb2.ContainerRequest(
        pod=engines.pod(handler="runc"), container=engines.container(*mounts)
    )
    for _ in range(PLAIN_ROUNDS):
        await measured.timed(CALL, node.engine.raw("Shutdown", nri_pb2.ConfigureResponse()))
        await measured.timed(PLAIN, node.engine.raw("CreateContainer", asked))


def _disk(directory: Path, number: int) -> loop.LoopDevice:
    image = directory / f"image-{number}"
    image.touch()
    os.truncate(image, 64 << 20)
    return loop.attach(str(image))


async def _creates(node: _Node, measured: Measured) -> None:
    with ExitStack() as stack:
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crust-k-")))
        paths = {}
        for number in range(MANY):
            attached = _disk(disk, number)
            stack.callback(loop.detach, attached)
            target = f"{node.directory}/target-{number}"
            os.mkdir(target)
            paths[target] = attached.path
        for number in range(2 * CREATES):
            label, count = ((CREATE, 1), (CREATE_MANY, MANY))[number % 2]
            targets = list(paths)[:count]
            for target in targets:
                node.proxy.publish(paths[target], target, handler=HANDLER, guard=True)
            with sandbox.running(node.directory / "sbs", f"sandbox-{number:04}") as box:
                pod = engines.pod(box.id, handler=HANDLER, pid=box.pid)
                mounts = [(target, f"/data{place}") for place, target in enumerate(targets)]
                app = engines.container(*mounts, pod_id=box.id, id_=f"c-{number:08}")
                await measured.timed(label, node.engine.create(pod, app))
            for target in targets:
                await asyncio.to_thread(_unpublish, node.proxy, target)


def _unpublish(proxy: testing.FakeProxy, target: str) -> None:
    """Once the keeper has freed the volume of a machine that has ended."""
    while True:
        try:
            proxy.unpublish(target, guard=True)
        except claims.HeldBySandbox:
            time.sleep(0.01)
        else:
            return


async def _ends(node: _Node, measured: Measured) -> None:
    """The engine ends the connection, and then is away itself: until moments of the plugin's pause that differ."""
    for _ in range(ENDS):
        node.engine.disconnect()
        await measured.timed(BACK, node.engine.registered.wait())
    socket = f"{node.directory}/nri.sock"
    os.unlink(socket)
    node.engine.disconnect()
    for number in range(ENDS):
        await asyncio.sleep(1 + number / ENDS)
        async with engines.serving(socket, engines.Engine()) as engine:
            await measured.timed(AGAIN, engine.registered.wait())


async def _at_rest(pid: int) -> dict[str, figures.Samples]:
    await asyncio.sleep(10)  # until work that was begun has ended
    busy_s, began_s = machine.processor_s(pid), time.monotonic()
    await asyncio.sleep(REST_S)
    percent = 100 * (machine.processor_s(pid) - busy_s) / (time.monotonic() - began_s)
    return {
        REST: figures.Samples.of("%", [percent]),
        **_memory(pid),
    }


def _memory(pid: int) -> dict[str, figures.Samples]:
    _, *lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = {name: int(value) for name, value, _ in map(str.split, lines)}
    return {
        label: figures.Samples.of("MiB", [kib[f"{name}:"] / 1024]) for name, label in MEMORY.items()
    }
