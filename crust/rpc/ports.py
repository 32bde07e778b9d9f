"""How the parts of a process reach one another, and everybody else: by the path of a socket.

A part serves at a path and calls a path. Between processes both are sockets. Where several parts run in one process,
the paths that they have in common lead from one part to the other without a socket, whichever part starts first.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

import grpc

from crust.core import errors, logs
from crust.rpc.call import Call
from crust.rpc.port import Port, SocketPort
from crust.rpc.serving import server
from crust.rpc.serving.service import Service
from crust.rpc.status import PeerStatus


class LocalPort(Port):
    """The end within the process: a method runs in its caller's task. `service` has the part, while it serves."""

    def __init__(self, service: Callable[[], Service | None]) -> None:
        self._service = service

    @property
    def connection(self) -> int:
        """Always the first one."""
        return 1

    def is_connected(self) -> bool:
        """Always."""
        return True

    async def answer(self, call: Call, data: bytes) -> bytes:
        """See `Port`."""
        try:
            async with asyncio.timeout(call.time_remaining()):
                return await self._part(call.method).answer(call, data, is_inner=True)
        except TimeoutError:
            raise _timed_out() from None

    async def forward(self, call: Call, data: bytes) -> bytes:
        """See `Port`. The caller's own deadline holds."""
        return await self._part(call.method).answer(call, data, is_inner=True)

    async def stream(self, call: Call, data: bytes) -> AsyncGenerator[bytes, None]:
        """See `Port`. The method runs while its reader waits for an answer, and no longer; it has fields of its own,
        and its reader goes on with those of the reader.
        """
        answers = self._part(call.method).stream(call, data, is_inner=True)
        fields = logs.context.get()
        async with contextlib.aclosing(answers):
            while True:
                around = logs.context.get()
                logs.context.set(fields)
                try:
                    async with asyncio.timeout(call.time_remaining()):
                        answer = await anext(answers, None)
                except TimeoutError:
                    raise _timed_out() from None
                finally:
                    fields = logs.context.get()
                    logs.context.set(around)
                if answer is None:
                    return
                yield answer

    async def aclose(self) -> None:
        """Nothing to do."""

    def _part(self, method: str) -> Service:
        service = self._service()
        if service is None:
            raise PeerStatus.of(
                errors.PeerUnavailable.named(
                    "NotServedYet",
                    f"{method.rpartition('/')[2]} cannot be answered",
                    why="the part of this process that answers it does not run",
                    hint="retry: the process is starting or stopping",
                )
            )
        return service


def _timed_out() -> PeerStatus:
    return PeerStatus(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class Ports:
    """Gives out ports by path. Parts reach the paths `inner`, which have no socket, and `shared`, which other
    processes call too, within the process.
    """

    def __init__(self, inner: Iterable[str] = (), shared: Iterable[str] = ()) -> None:
        self._inner = frozenset(inner)
        self._services: dict[str, Service | None] = dict.fromkeys((*self._inner, *shared))

    def connect(self, path: str) -> Port:
        """A port to the part that serves at `path`, now or later. The caller closes it. Raises as `SocketPort`."""
        if path not in self._services:
            return SocketPort(path)
        return LocalPort(lambda: self._services[path])

    @contextlib.asynccontextmanager
    async def serving(
        self, path: str, service: Service, *, lock_path: str | None = ""
    ) -> AsyncIterator[None]:
        """Serve at `path` while the block runs, as `server.serving` does where other processes call it."""
        is_local = path in self._services
        if is_local:
            self._services[path] = service
        try:
            if path in self._inner:
                yield
                return
            async with server.serving(path, service, lock_path=lock_path):
                yield
        finally:
            if is_local:
                self._services[path] = None


SOCKETS = Ports()
"""For a part that has its process for itself."""
