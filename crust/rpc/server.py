"""A gRPC server on a unix socket that belongs to exactly one process.

The server takes a lock, checks that nobody listens on the socket, binds a name beside it, and renames that over the
socket's path (`sockets`). The caller chooses the path of the lock, because CSI allows no other file beside a plugin's
socket. After a kill -9 the lock is free, and the next process replaces the stale socket. A running server checks
regularly whether the path is still its own socket. If not, nobody can reach it, and it reports itself as unhealthy.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc
import grpc.aio

from crust import errors
from crust.host.files import flocks
from crust.host.process import oserrors
from crust.rpc import channel, interceptors, sockets
from crust.rpc.health import Health

AddServicer = Callable[[grpc.aio.Server], None]
"""Adds a servicer to a server, e.g. `lambda s: add_NodeServicer_to_server(node, s)`."""


class SocketBindFailed(errors.RuntimeFailed):
    """gRPC cannot bind the socket."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the socket {path} cannot be served",
            why="it cannot be bound",
            hint="check that its directory exists and is writable; standard error has gRPC's reason",
        )
        self.path = path


@contextlib.asynccontextmanager
async def serving(
    socket_path: str,
    *add_servicers: AddServicer,
    name: str,
    lock_path: str = "",
    generic: Sequence[grpc.GenericRpcHandler] = (),
    health: Health | None = None,
) -> AsyncIterator[grpc.aio.Server]:
    """Serve on `socket_path` while the block runs; then wait for running calls.

    `lock_path` defaults to the socket's path with `.lock` added. `name` is the server's in logs and metrics. The
    server reports the loss of its socket to `health`, the health of the process. Raises `sockets.SocketInUse`,
    `sockets.NotASocket`, `SocketBindFailed`, `flocks.LockHeld`, `channel.SocketPathTooLong`.
    """
    channel.target_of(socket_path)
    health = health or Health()
    lock = await asyncio.to_thread(_claim, socket_path, lock_path or f"{socket_path}.lock")
    try:
        server = grpc.aio.server(
            interceptors=[interceptors.CallInterceptor(name, health)],
            handlers=list(generic),
            options=[*channel.OPTIONS, ("grpc.so_reuseport", 0)],
        )
        for add_servicer in add_servicers:
            add_servicer(server)
        own = await _start(server, socket_path)
        watch = asyncio.create_task(_watch(own, health), name=f"watch {socket_path}")
        try:
            yield server
        finally:
            watch.cancel()
            await asyncio.wait([watch])
            await asyncio.to_thread(own.remove)
            await server.stop(grace=GRACE_S)
    finally:
        lock.close()


GRACE_S = 5.0
"""How long a stopping server waits for running calls. The owner of the operations drains those."""

CHECK_S = 3.0
"""How often a server checks that its socket is still its own."""


def _claim(socket_path: str, lock_path: str) -> flocks.ProcessLock:
    for path in (socket_path, lock_path):
        with oserrors.translating(f"the directory of {path} cannot be created"):
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = flocks.ProcessLock.acquire(lock_path)
    try:
        sockets.check_free(socket_path)
    except BaseException:
        lock.close()
        raise
    return lock


async def _start(server: grpc.aio.Server, socket_path: str) -> sockets.OwnSocket:
    """Start to serve, then rename the socket to its path, so that every caller that connects is answered."""
    bound = sockets.beside(socket_path)
    try:
        server.add_insecure_port(channel.target_of(bound))
    except RuntimeError as err:  # gRPC raises nothing else, for any reason
        raise SocketBindFailed(socket_path) from err
    await server.start()
    try:
        return await asyncio.to_thread(sockets.OwnSocket.place, bound, socket_path)
    except BaseException:
        await server.stop(grace=None)
        raise


async def _watch(own: sockets.OwnSocket, health: Health) -> None:
    while True:
        await asyncio.sleep(CHECK_S)
        try:
            problem: errors.CrustError | None = await asyncio.to_thread(own.problem)
        except errors.CrustError as error:
            problem = error
        health.report(f"socket {own.path}", problem)
