"""The path of a unix socket: whose it is, how it changes hands, and whether it is still ours.

gRPC binds a path that another server holds without a word: new callers go to the newcomer, and when the first one
stops it unlinks the newcomer's socket. So gRPC never gets the path itself. A server binds a hidden name beside it and
is renamed over it: a caller meets the old listener or the new one, never none, and what gRPC unlinks at its end is a
name that is gone.

A path on which anybody listens is never taken. Who listens may be unknown: SO_PEERCRED gives process 0 for a process
of another PID namespace, as a vendor's driver pod is to ours, so being connected is the answer and the process is
for the sentence alone.
"""

import hashlib
import os
import socket
import stat
import struct
from dataclasses import dataclass

from crust import errors
from crust.host.process import oserrors

_PROBE_S = 2.0


class SocketInUse(errors.NotReady):
    """Another process answers on the socket."""

    def __init__(self, path: str, pid: int) -> None:
        who = f"process {pid}" if pid else "a process of another PID namespace (another container)"
        super().__init__(
            f"the socket {path} cannot be served",
            why=f"{who} already listens on it",
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


class SocketLost(errors.NotReady):
    """The socket that this process serves is not at its path any more."""

    def __init__(self, path: str, *, replaced: bool) -> None:
        super().__init__(
            f"nobody reaches this process on {path}",
            why="another process put its own socket there"
            if replaced
            else "the socket was removed",
            hint="give that process another socket, then restart this one"
            if replaced
            else "restart this process",
        )
        self.path = path


Identity = tuple[int, int]
"""Device and inode of a socket's file."""


@dataclass(frozen=True, slots=True)
class OwnSocket:
    """A socket's file that this process has bound. Held open (O_PATH), so that its inode number is nobody else's."""

    path: str
    identity: Identity
    descriptor: int

    @classmethod
    def place(cls, bound: str, path: str) -> "OwnSocket":
        """Rename what is bound at `bound` over `path`, readable for this user alone. Blocks."""
        with oserrors.translating(f"the socket {path} cannot be put in place"):
            os.chmod(bound, 0o600)
            descriptor = os.open(bound, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                os.rename(bound, path)
            except BaseException:
                os.close(descriptor)
                raise
        return cls(path, (status.st_dev, status.st_ino), descriptor)

    def problem(self) -> SocketLost | None:
        """What a caller of the path would meet instead of us. Blocks."""
        there = identity_at(self.path)
        return None if there == self.identity else SocketLost(self.path, replaced=bool(there))

    def remove(self) -> None:
        """Remove the path if it is still ours, and let go of the file. Blocks."""
        with oserrors.translating(f"cannot remove {self.path}"):
            if identity_at(self.path) == self.identity:
                os.unlink(self.path)
        self.close()

    def close(self) -> None:
        """Let go of the file, and leave the path as it is."""
        os.close(self.descriptor)


def beside(path: str) -> str:
    """The hidden name that a server binds before it is renamed to `path`: always the same, and no longer."""
    directory, _, name = path.rpartition("/")
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{directory}/.{digest[: max(4, min(len(name) - 1, 16))]}"


def identity_at(path: str) -> Identity | None:
    """What lies at the path now; None if nothing does."""
    with oserrors.translating(f"cannot look at {path}"):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
    return status.st_dev, status.st_ino


def check_free(path: str) -> None:
    """Raise `SocketInUse` or `NotASocket` unless the path is absent or what a dead process left. Blocks."""
    with oserrors.translating(f"cannot look at {path}"):
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
    if not stat.S_ISSOCK(mode):
        raise NotASocket(path)
    pid = _listener(path)
    if pid is not None:
        raise SocketInUse(path, pid)


def _listener(path: str) -> int | None:
    """The process that listens on the socket, 0 if it cannot be seen from here; None if none does."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe, oserrors.translating(f"cannot look who listens on {path}"):
        # a listener that hangs has a full queue, and connect(2) would wait for it
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
