"""A bad link between a process and the daemons of a Ceph cluster: every segment that arrives is dropped, at both ends
or at the process alone. What the process sends arrives then, and it never learns so.

The process's sockets outlive it here. Else its kernel might send the end of the connection with the last data, and an
OSD that sees both at once may drop the data (osd_discard_disconnected_ops), or not.
"""

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class LossyPath:
    """The connections of one process, whose segments are dropped at both ends."""

    ends: list[socket.socket]
    """Of the process."""
    far_ends: list[socket.socket]
    ports: frozenset[int]
    """Of the process."""

    def wait_until_sent(self, data_bytes: int) -> None:
        """Until the process's kernel has so much in a socket that nobody has acknowledged."""
        pause = threading.Event()
        while max(connection.unsent for connection in self._own()) < data_bytes:
            pause.wait(0.05)

    def deliver(self) -> None:
        """Deliver again, and wait until the daemons have read all that the process had sent."""
        for end in (*self.far_ends, *self.ends):
            end.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        pause = threading.Event()
        while any(connection.unsent for connection in self._own()):
            pause.wait(0.1)
        while any(
            connection.unread for connection in _connections() if connection.peer in self.ports
        ):
            pause.wait(0.1)

    def close(self) -> None:
        for end in (*self.far_ends, *self.ends):
            end.close()

    def _own(self) -> list["_Connection"]:
        return [connection for connection in _connections() if connection.port in self.ports]


@dataclass(frozen=True)
class _Connection:
    """A line of /proc/net/tcp."""

    inode: str
    port: int
    peer: int
    unsent: int
    """Bytes that were sent and not acknowledged, or not sent yet."""
    unread: int


@contextlib.contextmanager
def cut(pid: int, *, answers_alone: bool = False) -> Iterator[LossyPath]:
    """Cut the process off from whatever it is connected to by TCP, in both directions or only towards it."""
    own = _sockets(pid)
    ports = frozenset(end.getsockname()[1] for end in own)
    far_ends = [] if answers_alone else [far for port in ports for far in _far_ends(port)]
    path = LossyPath(own, far_ends, ports)
    try:
        for end in (*path.far_ends, *own):
            _drop_all(end)
        yield path
    finally:
        path.close()


def _sockets(pid: int) -> list[socket.socket]:
    """Duplicates of its connected TCP sockets."""
    ends = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:"):
                end = _duplicate(pid, int(number))
                if end.family == socket.AF_INET and end.getpeername():
                    ends.append(end)
    return ends


def _far_ends(port: int) -> list[socket.socket]:
    """The other ends of connections from this port, each once: a daemon that forks has it in two processes."""
    inodes = {
        f"socket:[{connection.inode}]" for connection in _connections() if connection.peer == port
    }
    ends: dict[str, socket.socket] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    name = os.readlink(f"/proc/{pid}/fd/{number}")
                    if name in inodes and name not in ends:
                        ends[name] = _duplicate(int(pid), int(number))
    return list(ends.values())


def _connections() -> list[_Connection]:
    connections = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_, inode = line.split()[:10]
        port, peer = (int(address.rpartition(":")[2], 16) for address in (local, remote))
        unsent, unread = (int(queue, 16) for queue in queues.split(":"))
        connections.append(_Connection(inode, port, peer, unsent, unread))
    return connections


def _duplicate(pid: int, number: int) -> socket.socket:
    pidfd = os.pidfd_open(pid)
    try:
        descriptor = _LIBC.syscall(_PIDFD_GETFD, pidfd, number, 0)
    finally:
        os.close(pidfd)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return socket.socket(fileno=descriptor)


def _drop_all(end: socket.socket) -> None:
    code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K 0
    program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))
    end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
