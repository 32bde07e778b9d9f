"""How long after the rename a runtime handler sees a new entry.

A separate process publishes by `Store.publish` and prints the time of its rename. Three directories take turns: one
watched by bare inotify(7), the lower bound; one watched by `crust.handoff.watch`; and one watched in the same way
that holds other entries, all of which a look reads. Measured are the hint ("look again") and the change: the
directory scanned, the record read and checked. Every volume is unpublished again before the next one.
"""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks import figures, inotify, node, records
from crust.handoff import watch
from crust.handoff.entry import DirectoryReader
from crust.handoff.layout import Layout
from crust.handoff.store import Store

NAME = "watch"
ROUNDS = 400
WARM_UP = 20
OTHERS = 100
INOTIFY = "bare inotify(7): the event"
HINT = "handoff.watch: the hint"
CHANGE = "handoff.watch: the record, read"
CHANGE_OF_MANY = f"handoff.watch: the record, read, beside {OTHERS} other entries"

Times = figures.Collector[str]


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds after the rename."""

    samples: dict[str, figures.Samples]

    def report(self) -> figures.Report:
        """The figures."""
        return figures.Report(
            name=NAME,
            title="From the rename of an entry to the handler",
            method=f"{ROUNDS} volumes per row, published one at a time by another process, on a tmpfs.",
            rows=tuple(
                figures.Row(label, samples, "" if label == INOTIFY else INOTIFY)
                for label, samples in self.samples.items()
            ),
            meaning=(
                "The hint needs a thread beside the event loop; the record needs a scan of every entry."
            ),
        )


class Stamped(watch.Watch):
    """A watch that records the time of its last hint."""

    hinted_ns = 0

    async def __anext__(self) -> None:
        """Wait for a hint and record its time."""
        await super().__anext__()
        self.hinted_ns = time.monotonic_ns()


class Reader:
    """Reads the directory as a runtime does: a look at each hint."""

    def __init__(self, watched: Stamped) -> None:
        self._watched = watched
        self._reader = DirectoryReader(Layout(watched.root))
        self._names: frozenset[str] | None = None

    async def look(self) -> tuple[int, int]:
        """Wait until an entry appears or goes; returns the times of the hint and of the record."""
        async for _ in self._watched:
            hinted_ns = self._watched.hinted_ns
            names = frozenset((await asyncio.to_thread(self._reader.look)).names)
            if names != self._names:
                self._names = names
                return hinted_ns, time.monotonic_ns()
        raise AssertionError("the watch has ended")


@dataclass(frozen=True, slots=True)
class Writer:
    """The process that publishes."""

    process: asyncio.subprocess.Process

    async def send(self, command: str, root: str, number: int) -> int:
        """Have it publish or unpublish; returns the time of its rename."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command} {root} {number}\n".encode())
        return int(await self.process.stdout.readline())


async def measure() -> Result:
    """Measure in three directories."""
    with node.directories() as paths:
        async with AsyncExitStack() as stack:
            writer = await stack.enter_async_context(_writer())
            roots = [str(paths.crust_run / name) for name in ("bare", "alone", "many")]
            for root in roots:
                Store(root).open()
            for number in range(OTHERS):
                Store(roots[2]).write(records.record(ROUNDS + WARM_UP + number))
            events = stack.enter_context(inotify.times_of(roots[0], inotify.MOVED_TO))
            readers = [await _reader(root, stack) for root in roots[1:]]
            times = Times()
            for number in range(WARM_UP + ROUNDS):
                if number == WARM_UP:
                    times.values.clear()
                await _bare(writer, roots[0], number, events, times)
                await _watched(writer, roots[1], number, readers[0], times, (HINT, CHANGE))
                await _watched(writer, roots[2], number, readers[1], times, ("", CHANGE_OF_MANY))
    samples = times.samples()
    return Result({label: samples[label] for label in (INOTIFY, HINT, CHANGE, CHANGE_OF_MANY)})


async def _reader(root: str, stack: AsyncExitStack) -> Reader:
    reader = Reader(await stack.enter_async_context(Stamped(root)))
    await reader.look()  # the first look returns the entries that exist at the start
    return reader


async def _bare(
    writer: Writer, root: str, number: int, events: asyncio.Queue[int], times: Times
) -> None:
    renamed_ns = await writer.send("publish", root, number)
    times.add(INOTIFY, (await events.get() - renamed_ns) / 1e6)
    await writer.send("unpublish", root, number)
    await events.get()  # unpublishing is a rename in the directory too


async def _watched(
    writer: Writer, root: str, number: int, reader: Reader, times: Times, labels: tuple[str, str]
) -> None:
    looking = asyncio.ensure_future(reader.look())
    renamed_ns = await writer.send("publish", root, number)
    hinted_ns, read_ns = await looking
    for label, at_ns in zip(labels, (hinted_ns, read_ns), strict=True):
        times.add(label, (at_ns - renamed_ns) / 1e6)
    looking = asyncio.ensure_future(reader.look())
    await writer.send("unpublish", root, number)
    await looking


@contextlib.asynccontextmanager
async def _writer() -> AsyncIterator[Writer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.writer"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield Writer(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()
