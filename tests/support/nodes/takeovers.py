"""Processes that hold a state and serve one socket, and clients that call it without a pause while one takes over."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio

from crust.rpc import channel
from crust.rpc.serving import daemon, server
from crust.rpc.serving.daemon import Daemon
from crust.rpc.serving.gate import Gate, needs_state

CALL = "/csi.v1.Node/NodePublishVolume"


Call: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"


class Service(grpc.GenericRpcHandler):
    """Answers with its name, and only while it may write; a call of "slow" waits for `slow_ends`."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.may_write = True
        self.slow_began, self.slow_ends = asyncio.Event(), asyncio.Event()

    def end(self) -> None:
        """The locks are released next."""
        self.may_write = False

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        is_free = not needs_state(handler_call_details.method)

        async def behave(request: bytes, _: object) -> bytes:
            assert self.may_write or is_free
            if request == b"slow":
                self.slow_began.set()
                await self.slow_ends.wait()
                assert self.may_write
            return self.name

        return grpc.unary_unary_rpc_method_handler(behave)


class WatchedGate(Gate):
    """A gate that tells when it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = asyncio.Event()

    def close(self) -> None:
        """Also when a successor asks."""
        super().close()
        self.closed.set()


@dataclass
class Process:
    service: Service
    daemon: Daemon
    gate: WatchedGate
    stack: AsyncExitStack

    async def stop(self) -> None:
        await self.stack.aclose()


async def start(short: str, name: bytes, *, take_over: bool = False) -> Process:
    """What an app does: the lock, the state, the socket."""
    stack = AsyncExitStack()
    try:
        held = await stack.enter_async_context(
            daemon.starting(f"{short}/lock", take_over=take_over)
        )
        service, gate = Service(name), WatchedGate()
        held.owned.callback(service.end)
        await stack.enter_async_context(
            server.serving(f"{short}/a.sock", name="t", generic=[service], daemon=held, gate=gate)
        )
        await stack.enter_async_context(held.serves())
    except BaseException:
        await stack.aclose()
        raise
    return Process(service, held, gate, stack)


async def begun(call: Call, process: Process) -> asyncio.Task[bytes]:
    """A call that has begun at a process, and ends when the test says so."""
    slow = asyncio.ensure_future(call(b"slow", timeout=60))
    await process.service.slow_began.wait()
    return slow


@dataclass
class Clients:
    """Two callers without a pause longer than 5 ms: one connection for each call, and one for all."""

    path: str
    answers: Counter[bytes] = field(default_factory=Counter)
    """How many, by the process that gave them."""
    more: asyncio.Event = field(default_factory=asyncio.Event)

    async def per_call(self) -> None:
        while True:
            async with channel.connect(self.path) as connected:
                await self._call(connected)

    async def one_channel(self) -> None:
        async with channel.connect(self.path) as connected:
            while True:
                await self._call(connected)

    async def _call(self, connected: grpc.aio.Channel) -> None:
        call: Call = connected.unary_unary(CALL)
        self.add(await call(b"", timeout=60))
        await asyncio.sleep(0.005)

    def add(self, answer: bytes) -> None:
        """A call was answered."""
        self.answers[answer] += 1
        self.more.set()

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        """Call while the block runs; an error ends it."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.per_call()), group.create_task(self.one_channel())]
            yield
            for task in tasks:
                task.cancel()

    async def until(self, name: bytes, count: int) -> None:
        """Wait for some more answers of a process."""
        wanted = self.answers[name] + count
        async with asyncio.timeout(60):
            while self.answers[name] < wanted:
                self.more.clear()
                await self.more.wait()
