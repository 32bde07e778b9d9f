"""The owner of a unix socket's path: the process that listens there, and whether it still does.

gRPC binds a path that another server holds without an error: new connections go to the second server, and the first
server unlinks the second server's socket when it stops. So gRPC never binds the path itself. A server binds a hidden
name beside it, and renames that over the path: a caller always finds the old or the new listener, and gRPC at its end
unlinks a name that no longer exists.

A server never takes a path on which a process listens. SO_PEERCRED reports process 0 for a process of another PID
namespace, e.g. a vendor's driver pod. So a successful connect is the criterion, and the process id is only for the
message.
"""

import hashlib
import os
import socket
import stat
import struct
from dataclasses import dataclass

from crust.core import errors
from crust.host.process import syscalls

_PROBE_S = 2.0

Identity = tuple[int, int]
"""Device and inode of a socket's file."""


@dataclass(frozen=True, slots=True)
class OwnSocket:
    """The file of a socket that this process has bound, held open: so no other file gets its inode number."""

    path: str
    identity: Identity
    descriptor: int

    @classmethod
    def place(cls, bound: str, path: str) -> "OwnSocket":
        """Rename the bound socket `bound` over `path`, with access for this user only. Blocks."""
        with syscalls.translating(f"the socket {path} cannot be put in place"):
            os.chmod(bound, 0o600)
            descriptor = os.open(bound, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                os.rename(bound, path)
            except BaseException:
                os.close(descriptor)
                raise
        return cls(path, (status.st_dev, status.st_ino), descriptor)

    def problem(self) -> errors.CrustError | None:
        """The error if the path is not this socket any more. Blocks."""
        present = identity_at(self.path)
        if present == self.identity:
            return None
        stop = "give that process another socket, then restart this one"
        return errors.NotReady.named(
            "SocketLost",
            f"callers cannot reach this process on {self.path}",
            why="another process put its own socket there" if present else "the socket was removed",
            hint=stop if present else "restart this process",
        )

    def remove(self) -> None:
        """Remove the path if it is still this socket, and close the file. Blocks."""
        with syscalls.translating(f"cannot remove {self.path}"):
            if identity_at(self.path) == self.identity:
                os.unlink(self.path)
        os.close(self.descriptor)


def beside(path: str) -> str:
    """The hidden name that a server binds before the rename to `path`: always the same, at most as long as `path`."""
    directory, _, name = path.rpartition("/")
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{directory}/.{digest[: max(4, min(len(name) - 1, 16))]}"


def identity_at(path: str) -> Identity | None:
    """The identity of the file at the path now; None if there is none."""
    with syscalls.translating(f"cannot look at {path}"):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
    return status.st_dev, status.st_ino


def check_free(path: str) -> None:
    """Raise SocketInUse or `NotASocket`, unless the path is absent or the stale socket of a dead process.

    Blocks.
    """
    with syscalls.translating(f"cannot look at {path}"):
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
    if not stat.S_ISSOCK(mode):
        raise errors.NotReady.named(
            "NotASocket",
            f"the socket {path} cannot be served",
            why="the path names a file that is not a socket",
        )
    pid = listener(path)
    if pid is not None:
        holder = (
            f"process {pid}" if pid else "a process of another PID namespace (another container)"
        )
        raise errors.NotReady.named(
            "SocketInUse",
            f"the socket {path} cannot be served",
            why=f"{holder} already listens on it",
        )


def listener(path: str) -> int | None:
    """The process that listens on the socket, 0 if its id is unknown; None if no process listens."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe, syscalls.translating(f"cannot look for the listener on {path}"):
        # connect(2) would wait for a hanging listener, whose queue is full
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
