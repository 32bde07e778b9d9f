"""What the servers of one process share: the process's lock, its health, and how a successor takes it over.

The order of a takeover: the gates close, stage by stage, the callers' sockets first; what runs ends; everything in
`owned` is closed, newest first, the locks last; the successor takes them, reads the state and puts its sockets in
place; then whoever still calls us is handed on. We stand by until we are stopped, because old connections end here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc.aio

from crust import errors
from crust.host.files import flocks
from crust.rpc import channel, sockets, takeover
from crust.rpc.gate import Gate
from crust.rpc.health import Health

_log = logging.getLogger(__name__)

DRAIN_S = 60.0
"""How long running calls may take to end before a takeover is refused. Callers wait meanwhile."""


@dataclass(frozen=True, slots=True)
class _Served:
    own: sockets.OwnSocket
    lock: flocks.ProcessLock | None
    gate: Gate | None


class Daemon:
    """One process. `owned` holds what only one process may have; it is closed at a takeover and at the end."""

    def __init__(
        self, lock_path: str = "", predecessor: takeover.Predecessor | None = None
    ) -> None:
        self.health = Health()
        self.owned = AsyncExitStack()
        self.onward = AsyncExitStack()
        self.handed_over = False
        self._releasing = False
        self._lock_path = lock_path
        self._predecessor = predecessor
        self._served: list[_Served] = []
        self._settled: list[Callable[[], Awaitable[None]]] = []
        self._let_go: list[Callable[[], None]] = []
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def inherited(self, socket_path: str) -> sockets.Identity | None:
        """The live socket that a predecessor has at the path, which may be replaced."""
        return self._predecessor.released.get(socket_path) if self._predecessor else None

    @contextmanager
    def serving(
        self, own: sockets.OwnSocket, lock: flocks.ProcessLock | None, gate: Gate | None
    ) -> Iterator[None]:
        """Count the socket as served while the block runs."""
        served = _Served(own, lock, gate)
        if self._releasing and gate is not None:
            gate.close()
        self._served.append(served)
        try:
            yield
        finally:
            self._served.remove(served)

    def when_settled(self, idle: Callable[[], Awaitable[None]]) -> None:
        """Wait for `idle` before anything is let go: work that outlives its callers."""
        self._settled.append(idle)

    def when_handed_over(self, let_go: Callable[[], None]) -> None:
        """Call `let_go` once a successor serves, e.g. to end streams, whose callers then find it."""
        self._let_go.append(let_go)

    @asynccontextmanager
    async def serves(self) -> AsyncIterator[None]:
        """Everything is served: tell the predecessor, and be ready for a successor while the block runs."""
        if self._predecessor is not None:
            await self._predecessor.tell_serving()
        async with takeover.listening(f"{self._lock_path}.takeover", self._release) as ended:
            waits = asyncio.create_task(self._stand_by(ended), name="takeover")
            try:
                yield
            finally:
                waits.cancel()
                await asyncio.wait([waits])

    def end(self, error: errors.CrustError) -> None:
        """End the process with an error, because a part of it cannot go on."""
        if not self._lost.done():
            self._lost.set_exception(error)

    async def forever(self) -> None:
        """Until cancelled; raises `takeover.SuccessorLost`, and what `end` got."""
        await self._lost

    async def _release(self) -> Mapping[str, sockets.Identity]:
        gates = self._gates()
        self._releasing = True
        try:
            async with asyncio.timeout(DRAIN_S):
                for stage in sorted({gate.stage for gate in gates}):
                    await _close([gate for gate in gates if gate.stage == stage])
                for idle in self._settled:
                    await idle()
        except TimeoutError:
            self._releasing = False
            for gate in self._gates():
                gate.reopen()
            why = f"its operations have not ended within {DRAIN_S:g} s"
            raise takeover.TakeoverRefused(self._lock_path, why) from None
        self.handed_over = True
        await self.owned.aclose()
        for each in self._served:
            if each.lock is not None:
                each.lock.close()
        _log.info("state released to the successor")
        return {each.own.path: each.own.identity for each in self._served}

    def _gates(self) -> list[Gate]:
        return [each.gate for each in self._served if each.gate is not None]

    async def _stand_by(self, ended: asyncio.Future[None]) -> None:
        try:
            await asyncio.shield(ended)
        except takeover.SuccessorLost as lost:
            self._lost.set_exception(lost)
            return
        for each in self._served:
            if each.gate is not None:
                each.gate.hand_on(self._connect(each.own.path))
        for let_go in self._let_go:
            let_go()
        _log.info("taken over; stop this process when its callers have left")

    def _connect(self, socket_path: str) -> grpc.aio.Channel:
        """A channel to the successor, for as long as our servers may hand on to it."""
        connected = channel.connect(socket_path)
        self.onward.push_async_callback(connected.close)
        return connected


async def _close(gates: list[Gate]) -> None:
    for gate in gates:
        gate.close()
    for gate in gates:
        await gate.idle()


@asynccontextmanager
async def starting(lock_path: str, *, take_over: bool = False) -> AsyncIterator[Daemon]:
    """The process that holds the lock while the block runs, or until a successor serves.

    With `take_over` a live holder is asked to let go. Raises `flocks.LockHeld`, `takeover.TakeoverRefused`.
    """
    predecessor = None
    try:
        lock = await asyncio.to_thread(flocks.ProcessLock.acquire, lock_path)
    except flocks.LockHeld:
        if not take_over:
            raise
        predecessor = await takeover.ask(f"{lock_path}.takeover")
        lock = await asyncio.to_thread(flocks.ProcessLock.acquire, lock_path)
        _log.info("took the state over", extra={"lock": lock_path})
    daemon = Daemon(lock_path, predecessor)
    daemon.owned.callback(lock.close)
    try:
        yield daemon
    finally:
        if predecessor is not None:
            predecessor.close()
        await daemon.onward.aclose()
        await daemon.owned.aclose()
