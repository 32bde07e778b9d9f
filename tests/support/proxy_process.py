"""A real proxy process that dies by kill -9 right before the n-th call that changes the disk.

Processes come from a fork server that has everything imported and no gRPC running: starting one takes a few
milliseconds. `Killable` is used from a test's loop; what blocks hops to a thread.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from crust.proxy import app
from tests.support import crashes
from tests.support.fake_targets import FakeDevices, FakeTargets
from tests.support.node import Places

CHANGES = ("fsync", "rename", "link", "unlink", "mkdir", "rmdir", "utime")
NEVER = -1
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.proxy_process"])


class Killable:
    """One proxy process."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    async def ended(self) -> int:
        """Wait until it is gone; returns its exit code, negative for a signal."""
        await asyncio.to_thread(self._process.join)
        assert self._process.exitcode is not None
        return self._process.exitcode

    async def kill(self) -> None:
        """kill -9, and wait."""
        self._process.kill()
        await self.ended()


@asynccontextmanager
async def running(places: Places, *, die_at: int = NEVER) -> AsyncIterator[Killable]:
    """A proxy that serves, and dies at the `die_at`-th change (from 0) after it began to."""
    here, there = _context.Pipe()
    process = _context.Process(target=_serve, args=(places, die_at, there))
    await asyncio.to_thread(process.start)
    there.close()
    try:
        assert await asyncio.to_thread(here.recv) == "serving"
        yield Killable(process)
    finally:
        here.close()
        process.kill()
        await asyncio.to_thread(process.join)
        process.close()


def _serve(places: Places, die_at: int, ready: Connection) -> None:
    asyncio.run(_run(places, die_at, ready))


async def _run(places: Places, die_at: int, ready: Connection) -> None:
    settings = places.settings(grace_s=20)
    targets = FakeTargets(places.kubelet)
    async with app.running(settings, targets=targets, devices=FakeDevices()):
        with crashes.at_call(die_at, _die, calls=CHANGES):
            ready.send("serving")
            await asyncio.get_running_loop().create_future()


def _die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
