"""What the servers of one process share: the process's lock, its health, and how a successor takes it over.

The order of a takeover: the gates close, stage by stage, the callers' sockets first; running operations finish, until
none of any part runs at one moment; everything in `owned` is closed, newest first; no part starts an operation any
more, and what runs is waited for; the process's lock is released. The successor takes the locks, reads the state and
puts its sockets in place; then this process forwards the calls that still reach it. It runs until it is stopped,
because old connections end here.

The gates are at the sockets. A part that calls another one of the process, or that is asked through a store, has none
before it. So it is the operations that are refused at last: one that outlives its caller would write beside the
successor.
"""

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc.aio

from crust import errors
from crust.host.files import flocks
from crust.host.process import systemd
from crust.operations import KeyedOperations
from crust.rpc import channel
from crust.rpc.serving import sockets, takeover
from crust.rpc.serving.gate import Gate
from crust.rpc.serving.health import Health

_log = logging.getLogger(__name__)

DRAIN_S = 60.0
"""How long running calls may take to end before a takeover is refused. Callers wait meanwhile."""


@dataclass(frozen=True, slots=True)
class _Served:
    own: sockets.OwnSocket
    lock: flocks.ProcessLock | None
    gate: Gate | None


class NotServing(errors.PeerUnavailable):
    """The process does not serve: it starts, or another one has taken it over."""

    def __init__(self) -> None:
        super().__init__(
            "this process does not serve",
            why="it has not finished its start, or its successor serves",
            hint="its log says what it waits for",
        )


started: contextvars.ContextVar[Callable[["Daemon"], None]] = contextvars.ContextVar("started")
"""Who wants to know the process that starts in this context: the server of its health."""


class Daemon:
    """One process. `owned` holds what only one process may have; it is closed at a takeover and at exit."""

    def __init__(
        self,
        lock_path: str = "",
        predecessor: takeover.Predecessor | None = None,
        *,
        of: str = "",
    ) -> None:
        """`of`: the driver that runs in the process, if one does."""
        self._of = of
        self.health = Health()
        self.readiness: list[Callable[[], errors.CrustError | None]] = []
        """What keeps the parts from serving now, besides `health`; asked by `check_ready`."""
        self.is_serving = False
        self.owned = AsyncExitStack()
        self.successor_channels = AsyncExitStack()
        self.taken_over = False
        self._releasing = False
        self._lock_path = lock_path
        self._predecessor = predecessor
        self._served: list[_Served] = []
        self._operations: list[Callable[[], Sequence[KeyedOperations]]] = []
        self._after_takeover: list[Callable[[], None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

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

    def before_release(self, running: Callable[[], Sequence[KeyedOperations]]) -> None:
        """Nothing is released while one of these runs: work that outlives its callers."""
        self._operations.append(running)

    async def drain(self) -> None:
        """Refuse new operations of all parts, and wait for those that run."""
        for each in self._all_operations():
            await each.drain()

    def after_takeover(self, action: Callable[[], None]) -> None:
        """Call `action` once a successor serves, e.g. to end streams, whose callers then connect to it."""
        self._after_takeover.append(action)

    @asynccontextmanager
    async def serves(self) -> AsyncIterator[None]:
        """All is served: say so to the predecessor and to systemd, and accept a successor while the block runs."""
        if self._predecessor is not None:
            await self._predecessor.report_serving()
        self.is_serving = True
        async with takeover.listening(
            f"{self._lock_path}.takeover", self._release, self._of
        ) as ended:
            waits = asyncio.create_task(self._stand_by(ended), name="takeover")
            systemd.report_serving()
            try:
                yield
            finally:
                waits.cancel()
                await asyncio.wait([waits])

    def check_ready(self) -> None:
        """Raise why this process cannot serve all calls now."""
        if not self.is_serving or self.taken_over:
            raise NotServing()
        self.health.check()
        for problem in (check() for check in self.readiness):
            if problem is not None:
                raise problem

    def end(self, error: errors.CrustError) -> None:
        """End the process with an error, because a part of it cannot go on."""
        if not self._failed.done():
            self._failed.set_exception(error)

    async def forever(self) -> None:
        """Until cancelled; raises `takeover.SuccessorLost`, and what `end` got."""
        await self._failed

    async def _release(self) -> Mapping[str, sockets.Identity]:
        gates = self._gates()
        self._releasing = True
        try:
            async with asyncio.timeout(DRAIN_S):
                for stage in sorted({gate.stage for gate in gates}):
                    await _close([gate for gate in gates if gate.stage == stage])
                # one part's operation may begin another part's: none may run at one moment
                while running := [each for each in self._all_operations() if each.running()]:
                    await running[0].idle()
        except TimeoutError:
            self._releasing = False
            for gate in self._gates():
                gate.reopen()
            why = f"its operations have not ended within {DRAIN_S:g} s"
            raise takeover.TakeoverRefused(self._lock_path, why) from None
        self.taken_over = True
        await self.owned.aclose()
        for each in self._served:
            if each.lock is not None:
                each.lock.close()
        _log.info("state released to the successor")
        return {each.own.path: each.own.identity for each in self._served}

    def _all_operations(self) -> list[KeyedOperations]:
        return [each for running in self._operations for each in running()]

    def _gates(self) -> list[Gate]:
        return [each.gate for each in self._served if each.gate is not None]

    async def _stand_by(self, ended: asyncio.Future[None]) -> None:
        try:
            await asyncio.shield(ended)
        except takeover.SuccessorLost as lost:
            self._failed.set_exception(lost)
            return
        for each in self._served:
            if each.gate is not None:
                each.gate.forward_to(self._connect(each.own.path))
        for action in self._after_takeover:
            action()
        _log.info("taken over; stop this process when its callers have left")

    def _connect(self, socket_path: str) -> grpc.aio.Channel:
        """A channel to the successor, for as long as this process may forward calls to it."""
        connected = channel.connect(socket_path)
        self.successor_channels.push_async_callback(connected.close)
        return connected


async def _close(gates: list[Gate]) -> None:
    for gate in gates:
        gate.close()
    for gate in gates:
        await gate.idle()


@asynccontextmanager
async def starting(
    lock_path: str, *, take_over: bool = False, of: str = ""
) -> AsyncIterator[Daemon]:
    """The process that holds the lock while the block runs, or until a successor serves.

    With `take_over` a live holder is asked to release it, which one of another driver than `of` refuses. Raises
    `flocks.LockHeld`, `takeover.TakeoverRefused`.
    """
    predecessor = None
    try:
        lock = await asyncio.to_thread(flocks.ProcessLock.acquire, lock_path)
    except flocks.LockHeld:
        if not take_over:
            raise
        predecessor = await takeover.ask(f"{lock_path}.takeover", of)
        lock = await asyncio.to_thread(flocks.ProcessLock.acquire, lock_path)
        _log.info("took the state over", extra={"lock": lock_path})
    daemon = Daemon(lock_path, predecessor, of=of)
    daemon.owned.callback(lock.close)
    daemon.owned.push_async_callback(daemon.drain)
    announce = started.get(None)
    if announce is not None:
        announce(daemon)
    try:
        yield daemon
    finally:
        if predecessor is not None:
            predecessor.close()
        await daemon.successor_channels.aclose()
        await daemon.owned.aclose()
