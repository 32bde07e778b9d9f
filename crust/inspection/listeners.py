"""The process that listens at a socket's path, by the kernel's socket diagnostics (sock_diag(7)), for messages alone.

A failed connect(2) says that nobody took the connection; the kernel says which process should. A socket's file may
be removed or replaced while its process serves: then the process is found by the name that it bound. The kernel shows
the sockets of the caller's network namespace. So no answer is no proof that nobody listens.

pyroute2 takes 12 MiB and 0.3 s: a command imports it after a connection failed, a daemon never.
"""

import errno
import socket
from dataclasses import dataclass
from typing import Any

from crust.host import answers
from crust.host.process import open_files
from crust.rpc.serving import sockets

_LISTEN = 1 << 10
"""TCP_LISTEN of linux/tcp_states.h, as a bit: unix sockets have the states of TCP."""


@dataclass(frozen=True, slots=True)
class Listener:
    pids: tuple[int, ...]
    """The processes that have it open, as far as this process may look."""
    is_at_path: bool
    """Whether the path's file is this socket's; else the file was removed or replaced."""
    waiting: int
    """The connections that it has not accepted."""


def at(path: str) -> Listener | None:
    """The socket that listens at the path, or that was bound to it. None if the kernel names none. Blocks."""
    file = sockets.identity_at(path)
    # a server of crust binds a name beside the path, and renames it
    names = (path, sockets.beside(path))
    at_path, removed = None, None
    match answers.ask("the listening sockets", _listening):
        case answers.Present(messages):
            for message in messages:
                attributes = dict(message["attrs"])
                inode = attributes.get("UNIX_DIAG_VFS", {}).get("udiag_vfs_ino")
                # the inode alone: the kernel writes the device in a form of its own
                if file is not None and inode == file[1]:
                    at_path = message
                elif attributes.get("UNIX_DIAG_NAME") in names:
                    removed = message
    found = at_path or removed
    if found is None:
        return None
    waiting = dict(found["attrs"]).get("UNIX_DIAG_RQLEN", {}).get("udiag_rqueue", 0)
    pids = tuple(open_files.having_socket(found["udiag_ino"]))
    return Listener(pids, found is at_path, waiting)


def _listening() -> list[Any]:
    """All listening unix sockets of this network namespace. Raises `OSError`, also for a kernel without unix_diag."""
    from pyroute2 import DiagSocket
    from pyroute2.netlink import diag, exceptions

    show = diag.UDIAG_SHOW_NAME | diag.UDIAG_SHOW_VFS | diag.UDIAG_SHOW_RQLEN
    try:
        with DiagSocket() as kernel:
            return list(kernel.get_sock_stats(family=socket.AF_UNIX, states=_LISTEN, show=show))
    except exceptions.NetlinkError as err:
        raise OSError(err.code, str(err)) from err


def reason(path: str, err: OSError, start: str) -> tuple[str, str]:
    """Why a connection to the path failed, and what to do; `start` says how to start the daemon. Blocks."""
    restart = "read its log, restart it"
    reasons = {
        errno.ENOENT: ("the socket does not exist", f"{start}, or give its own --run-dir"),
        errno.ECONNREFUSED: ("the socket is stale, no process listens on it", start),
        errno.EACCES: ("this user may not open it", "run the command as root"),
        errno.ENOTDIR: ("a part of its path is not a directory", "correct the path"),
        errno.EAGAIN: ("it accepts no more connections", restart),
    }
    is_late = isinstance(err, TimeoutError)
    if is_late or err.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):
        listener = at(path)
        if listener is not None:
            pids = " ".join(map(str, listener.pids))
            process = f"process {pids}" if pids else "a process"
            if not listener.is_at_path:
                return f"{process} serves it, and its file was removed or replaced", restart
            return f"{process} accepts none of {listener.waiting} connections", restart
    if is_late:
        return "it does not accept the connection", restart
    return reasons.get(err.errno or 0, (err.strerror or str(err), "look at the path"))
