"""A real proxy process that dies by kill -9 right before the n-th call that changes the disk; and a real shim.

Processes come from a fork server that has everything imported and no gRPC running: starting one takes a few
milliseconds. `Killable` is used from a test's loop; what blocks hops to a thread.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from crust.csi_shim.wrap.node_shim import Wrapping
from tests.support.faults import crashes
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.fake_targets import FakeDevices
from tests.support.nodes.node import Node
from tests.support.nodes.places import Places

CHANGES = ("fsync", "rename", "link", "unlink", "mkdir", "rmdir", "utime")
NEEDING_SPACE = ("open", "write", "fsync", "mkdir", "rename", "link")
NEVER = -1
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.nodes.proxy_process"])


class Killable:
    """One proxy process."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    async def ended(self) -> int:
        """Wait until it is gone; returns its exit code, negative for a signal."""
        await asyncio.to_thread(self._process.join)
        assert self._process.exitcode is not None
        return self._process.exitcode

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def suspend(self) -> None:
        """SIGSTOP: it goes on accepting connections, as the kernel does it, and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        if self.is_alive:
            os.kill(self._process.pid, number)

    async def kill(self) -> None:
        """kill -9, and wait."""
        self._process.kill()
        await self.ended()


@dataclass(frozen=True)
class Faults:
    """What happens to a proxy at its n-th change (from 0) after it began to serve: it dies, the disk is full once."""

    die_at: int = NEVER
    no_space_at: int = NEVER


@asynccontextmanager
async def running(
    places: Places, *, die_at: int = NEVER, no_space_at: int = NEVER, grace_s: float = 20
) -> AsyncIterator[Killable]:
    """A proxy that serves, with its faults."""
    async with _process(_proxy, places, Faults(die_at, no_space_at), grace_s) as killable:
        yield killable


@asynccontextmanager
async def running_shim(
    places: Places, *, wrapping: Wrapping | None = None, die_at: int = NEVER
) -> AsyncIterator[Killable]:
    """A shim that serves, until its n-th change of a directory."""
    async with _process(_shim, places, wrapping, die_at) as killable:
        yield killable


@asynccontextmanager
async def _process(serve: Callable[..., Any], *arguments: Any) -> AsyncIterator[Killable]:
    receiver, ready = _context.Pipe()
    process = _context.Process(target=_run, args=(serve, ready, arguments))
    await asyncio.to_thread(process.start)
    ready.close()
    try:
        assert await asyncio.to_thread(receiver.recv) == "serving"
        yield Killable(process)
    finally:
        receiver.close()
        process.kill()
        await asyncio.to_thread(process.join)
        process.close()


def _run(serve: Callable[..., Any], ready: Connection, arguments: tuple[Any, ...]) -> None:
    asyncio.run(serve(ready, *arguments))


async def _proxy(ready: Connection, places: Places, faults: Faults, grace_s: float) -> None:
    devices = FakeDevices(sizes_file=places.sizes)
    async with FakeNode(places, grace_s=grace_s, devices=devices).part("proxy"):
        with (
            crashes.at_call(faults.die_at, _die, calls=CHANGES),
            crashes.at_call(faults.no_space_at, crashes.no_space, calls=NEEDING_SPACE),
        ):
            ready.send("serving")
            await asyncio.get_running_loop().create_future()


async def _shim(ready: Connection, places: Places, wrapping: Wrapping | None, die_at: int) -> None:
    async with Node(places, wrapping=wrapping).part("shim"):
        with crashes.at_call(die_at, _die, calls=("mkdir", "chmod", "rmdir", "unlink")):
            ready.send("serving")
            await asyncio.get_running_loop().create_future()


def _die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
