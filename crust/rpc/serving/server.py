"""A gRPC server on a unix socket that belongs to exactly one process.

The server takes a lock, checks that no process listens on the socket, binds a name beside it, and renames that over
the socket's path (`sockets`). The caller chooses the path of the lock, because CSI allows no other file beside a
plugin's socket. After a kill -9 the lock is free, and the next process replaces the stale socket. A running server
checks regularly that the path is still its own socket; if not, it reports itself as unhealthy.

A part serves at a path and calls a path (`Ports`). Between processes both are sockets. Parts of one process reach
each other by a common path without a socket, in any order of their starts.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from crust.core import errors, logs
from crust.core.supervised import Health, supervised
from crust.host.files import locks
from crust.host.process import syscalls, workers
from crust.rpc import channel
from crust.rpc.call import Call, pairs
from crust.rpc.port import Port, SocketPort
from crust.rpc.serving import sockets
from crust.rpc.serving.service import Service
from crust.rpc.status import TIMED_OUT, PeerStatus

GRACE_S = 5.0
"""How long a stopping server waits for running calls. The owner of the operations drains the operations."""
CHECK_S = 3.0
"""How often a server checks that its socket is still its own."""

_Context = grpc.aio.ServicerContext[bytes, bytes]


@dataclass(eq=False)
class _Handlers(grpc.GenericRpcHandler):
    """gRPC's side of a service: bytes in, bytes out. A method with perhaps a stream of answers travels as a stream,
    which is the same on the wire for one answer. No method has a stream of requests: the first message counts (D-28).
    """

    _service: Service
    _known: dict[str, Any] = field(default_factory=dict)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        handler = self._known.get(method)
        if handler is None and self._service.is_unary(method):
            handler = grpc.unary_unary_rpc_method_handler(partial(self._answer, method))
            self._known[method] = handler
        elif handler is None and self._service.streams(method):
            # not kept: callers choose other names, without a bound
            return grpc.unary_stream_rpc_method_handler(partial(self._answers, method))
        return handler

    async def _answer(self, method: str, data: bytes, context: _Context) -> bytes:
        metadata = pairs(context.invocation_metadata())
        call = Call(method, metadata, context.time_remaining(), context.send_initial_metadata)
        try:
            answered = await self._service.answer(call, data)
        except PeerStatus as status:
            await context.abort(status.code, status.text, status.trailing)
        if call.trailing:
            context.set_trailing_metadata(call.trailing)
        return answered

    async def _answers(self, method: str, data: bytes, context: _Context) -> AsyncIterator[bytes]:
        metadata = pairs(context.invocation_metadata())
        call = Call(method, metadata, context.time_remaining(), context.send_initial_metadata)
        try:
            async with contextlib.aclosing(self._service.stream(call, data)) as answered:
                async for answer in answered:
                    yield answer
        except PeerStatus as status:
            await context.abort(status.code, status.text, status.trailing)
        if call.trailing:
            context.set_trailing_metadata(call.trailing)


@contextlib.asynccontextmanager
async def serving(
    socket_path: str, service: Service, *, lock_path: str | None = ""
) -> AsyncIterator[grpc.aio.Server]:
    """Serve on `socket_path` while the block runs; then wait for running calls.

    `lock_path` defaults to the socket's path with `.lock` added; None: the process has a lock already. Raises
    `SocketInUse`, `NotASocket`, `SocketBindFailed`, `locks.LockHeld`, `SocketPathTooLong`.
    """
    channel.target_of(socket_path)
    if lock_path == "":
        lock_path = f"{socket_path}.lock"
    lock = await workers.run(_claim, socket_path, lock_path)
    try:
        server = grpc.aio.server(handlers=[_Handlers(service)], options=channel.SERVER_OPTIONS)
        bound = sockets.beside(socket_path)
        try:
            server.add_insecure_port(channel.target_of(bound))
        except RuntimeError as err:  # gRPC raises this for any reason
            raise errors.RuntimeFailed.named(
                "SocketBindFailed",
                f"the socket {socket_path} cannot be served",
                why="it cannot be bound",
            ) from err
        await server.start()  # before the rename: every caller that connects is answered
        try:
            placed = await workers.run(sockets.OwnSocket.place, bound, socket_path)
        except BaseException:
            await server.stop(grace=None)
            raise
        watch = supervised(
            "watch of a socket",
            lambda: _watch(placed, service.health),
            service.health,
            of=socket_path,
        )
        try:
            async with watch:
                yield server
        finally:
            await workers.run(placed.remove)
            await server.stop(grace=GRACE_S)
    finally:
        if lock is not None:
            lock.close()


def _claim(socket_path: str, lock_path: str | None) -> locks.ProcessLock | None:
    for path in (socket_path, lock_path or socket_path):
        with syscalls.translating(f"the directory of {path} cannot be created"):
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = locks.ProcessLock.acquire(lock_path) if lock_path else None
    try:
        sockets.check_free(socket_path)
    except BaseException:
        if lock is not None:
            lock.close()
        raise
    return lock


async def _watch(placed: sockets.OwnSocket, health: Health) -> None:
    while True:
        await asyncio.sleep(CHECK_S)
        try:
            problem: errors.CrustError | None = await workers.run(placed.problem)
        except errors.CrustError as error:
            problem = error
        health.report(f"socket {placed.path}", problem)


@dataclass(eq=False)
class LocalPort(Port):
    """The end within the process: a method runs in its caller's task. `service` has the part, while it serves."""

    _service: Callable[[], Service | None]

    @property
    def connection(self) -> int:
        return 1

    def is_connected(self) -> bool:
        return True

    async def answer(self, call: Call, data: bytes) -> bytes:
        try:
            async with asyncio.timeout(call.time_remaining()):
                return await self._part(call.method).answer(call, data, is_inner=True)
        except TimeoutError:
            raise PeerStatus(grpc.StatusCode.DEADLINE_EXCEEDED, TIMED_OUT) from None

    async def forward(self, call: Call, data: bytes) -> bytes:
        """See `Port`. The caller's own deadline holds."""
        return await self._part(call.method).answer(call, data, is_inner=True)

    async def stream(self, call: Call, data: bytes) -> AsyncGenerator[bytes, None]:
        """See `Port`. The method runs only while its reader waits for an answer; both keep fields of their own."""
        answers = self._part(call.method).stream(call, data, is_inner=True)
        fields = logs.context.get()
        async with contextlib.aclosing(answers):
            while True:
                outer = logs.context.get()
                logs.context.set(fields)
                try:
                    async with asyncio.timeout(call.time_remaining()):
                        answer = await anext(answers, None)
                except TimeoutError:
                    raise PeerStatus(grpc.StatusCode.DEADLINE_EXCEEDED, TIMED_OUT) from None
                finally:
                    fields = logs.context.get()
                    logs.context.set(outer)
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
                    why="the component of this process that answers it does not run",
                )
            )
        return service


class Ports:
    """Gives out ports by path. Parts of this process reach the paths `inner` and `shared` without a socket; `shared`
    have one too, for other processes.
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
        """Serve at `path` while the block runs: over a socket (`serving`), unless the path is `inner`."""
        is_local = path in self._services
        if is_local:
            self._services[path] = service
        try:
            if path in self._inner:
                yield
                return
            async with serving(path, service, lock_path=lock_path):
                yield
        finally:
            if is_local:
                self._services[path] = None


SOCKETS = Ports()
"""For a part that is alone in its process."""
