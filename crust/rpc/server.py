"""A server on a unix socket that belongs to exactly one process.

gRPC binds a path that another server holds without a word: new connections go to the newcomer, and when the first
one stops it unlinks the newcomer's socket, which leaves a live daemon unreachable. So: lock first, then look
whether anybody answers there, then bind, then narrow the mode. The lock lies where the caller says, because CSI
allows no other file beside a plugin's socket. After a kill -9 the lock is free and the stale socket is replaced.
"""

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc
import grpc.aio

from crust import errors
from crust.host.files import flocks
from crust.host.process import oserrors
from crust.rpc import channel, interceptors

Registration = Callable[[grpc.aio.Server], None]
"""Adds a servicer to a server, e.g. `lambda s: add_NodeServicer_to_server(node, s)`."""


class SocketInUse(errors.NotReady):
    """Another process answers on the socket."""

    def __init__(self, path: str, pid: int) -> None:
        super().__init__(
            f"the socket {path} cannot be served",
            why=f"process {pid} already listens on it",
            hint="stop that process, or give this one another socket",
        )
        self.path = path
        self.pid = pid


class NotASocket(errors.NotReady):
    """Something else lies at the socket's path."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the socket {path} cannot be served",
            why="there is something that is no socket",
            hint="look at what it is, and move it away",
        )


class SocketBindFailed(errors.RuntimeFailed):
    """The kernel refuses the socket."""

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
    *registrations: Registration,
    name: str,
    lock_path: str = "",
    generic: Sequence[grpc.GenericRpcHandler] = (),
) -> AsyncIterator[grpc.aio.Server]:
    """Serve on `socket_path` until the block is left; then let running calls finish.

    `lock_path` defaults to the socket's path with `.lock` added. `name` is the server's in logs and metrics.
    Raises `SocketInUse`, `NotASocket`, `SocketBindFailed`, `flocks.LockHeld`, `channel.SocketPathTooLong`.
    """
    target = channel.target_of(socket_path)
    lock = await asyncio.to_thread(_claim, socket_path, lock_path or f"{socket_path}.lock")
    try:
        server = grpc.aio.server(
            interceptors=[interceptors.CallInterceptor(name)],
            handlers=list(generic),
            options=[*channel.OPTIONS, ("grpc.so_reuseport", 0)],
        )
        for register in registrations:
            register(server)
        _bind(server, socket_path, target)
        await asyncio.to_thread(_narrow, socket_path)
        await server.start()
        try:
            yield server
        finally:
            await server.stop(grace=GRACE_S)
    finally:
        lock.close()


GRACE_S = 5.0
"""How long calls may take to finish when a server stops; operations are drained by their owner besides."""


_PROBE_S = 2.0


def _claim(socket_path: str, lock_path: str) -> flocks.ProcessLock:
    for path in (socket_path, lock_path):
        with oserrors.translating(f"the directory of {path} cannot be made"):
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = flocks.ProcessLock.acquire(lock_path)
    try:
        _check_free(socket_path)
    except BaseException:
        lock.close()
        raise
    return lock


def _bind(server: grpc.aio.Server, socket_path: str, target: str) -> None:
    try:
        server.add_insecure_port(target)
    except RuntimeError as err:  # all that gRPC says, whatever the reason
        raise SocketBindFailed(socket_path) from err


def _narrow(path: str) -> None:
    with oserrors.translating(f"the mode of {path} cannot be set"):
        os.chmod(path, 0o600)


def _check_free(path: str) -> None:
    with oserrors.translating(f"cannot look at {path}"):
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
    if not stat.S_ISSOCK(mode):
        raise NotASocket(path)
    pid = _listener(path)
    if pid:
        raise SocketInUse(path, pid)


def _listener(path: str) -> int:
    """The process that listens on the socket, 0 if none does (a socket that a killed process left)."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe, oserrors.translating(f"cannot look who listens on {path}"):
        probe.settimeout(
            _PROBE_S
        )  # a listener that hangs has a full queue, and connect(2) would wait for it
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return 0
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
