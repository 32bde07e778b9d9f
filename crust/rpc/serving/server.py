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
from typing import Any

import grpc
import grpc.aio

from crust import errors, operations
from crust.host.files import flocks
from crust.host.process import oserrors, workers
from crust.rpc import channel
from crust.rpc.serving import interceptors, sockets
from crust.rpc.serving.call_record import Served
from crust.rpc.serving.daemon import Daemon
from crust.supervised import supervised

AddServicer = Callable[[Any], None]
"""Adds a servicer to a server, on a socket or local, e.g. `lambda s: add_NodeServicer_to_server(node, s)`."""


@contextlib.asynccontextmanager
async def serving(  # noqa: PLR0913 - one per part of a server
    socket_path: str,
    *add_servicers: AddServicer,
    name: str,
    lock_path: str | None = "",
    generic: Sequence[grpc.GenericRpcHandler] = (),
    daemon: Daemon | None = None,
    admit: Callable[[str], None] | None = None,
    driver: Callable[[], str] = lambda: "",
) -> AsyncIterator[grpc.aio.Server]:
    """Serve on `socket_path` while the block runs; then wait for running calls.

    `lock_path` defaults to the socket's path with `.lock` added; None: a lock of `daemon` is enough. `name` is the
    server's in logs and errors, `driver` has the name of the CSI driver whose calls these are.
    `daemon` is the process, `admit` raises why a method cannot be served now. Raises `sockets.SocketInUse`,
    `sockets.NotASocket`, `SocketBindFailed`, `flocks.LockHeld`, `channel.SocketPathTooLong`.
    """
    channel.target_of(socket_path)
    daemon = daemon or Daemon()
    if lock_path == "":
        lock_path = f"{socket_path}.lock"
    lock = await workers.run(_claim, socket_path, lock_path)
    try:
        server = grpc.aio.server(
            interceptors=[interceptors.CallInterceptor(Served(name, driver), daemon.health, admit)],
            handlers=list(generic),
            options=[*channel.OPTIONS, ("grpc.so_reuseport", 0)],
        )
        for add_servicer in add_servicers:
            add_servicer(server)
        own = await _start(server, socket_path)
        watch = supervised(
            "watch of a socket", lambda: _watch(own, daemon), daemon.health, of=socket_path
        )
        try:
            async with watch:
                yield server
        finally:
            await workers.run(own.remove)
            await server.stop(grace=GRACE_S)
            await asyncio.sleep(operations.AFTER_ANSWER_S)  # the last calls are logged by then
    finally:
        if lock is not None:
            lock.close()


GRACE_S = 5.0
"""How long a stopping server waits for running calls. The owner of the operations drains those."""

CHECK_S = 3.0
"""How often a server checks that its socket is still its own."""


def _claim(socket_path: str, lock_path: str | None) -> flocks.ProcessLock | None:
    for path in (socket_path, lock_path or socket_path):
        with oserrors.translating(f"the directory of {path} cannot be created"):
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = flocks.ProcessLock.acquire(lock_path) if lock_path else None
    try:
        sockets.check_free(socket_path)
    except BaseException:
        if lock is not None:
            lock.close()
        raise
    return lock


async def _start(server: grpc.aio.Server, socket_path: str) -> sockets.OwnSocket:
    """Start to serve, then rename the socket to its path, so that every caller that connects is answered."""
    bound = sockets.beside(socket_path)
    try:
        server.add_insecure_port(channel.target_of(bound))
    except RuntimeError as err:  # gRPC raises nothing else, for any reason
        raise errors.RuntimeFailed.named(
            "SocketBindFailed",
            f"the socket {socket_path} cannot be served",
            why="it cannot be bound",
            hint=(
                "check that its directory exists and is writable; standard error has gRPC's reason"
            ),
        ) from err
    await server.start()
    try:
        return await workers.run(sockets.OwnSocket.place, bound, socket_path)
    except BaseException:
        await server.stop(grace=None)
        raise


async def _watch(own: sockets.OwnSocket, daemon: Daemon) -> None:
    while True:
        await asyncio.sleep(CHECK_S)
        try:
            problem: errors.CrustError | None = await workers.run(own.problem)
        except errors.CrustError as error:
            problem = error
        daemon.health.report(f"socket {own.path}", problem)
