"""Whether a file is open for writing anywhere, loop devices included: one question to the kernel about the file.

A read lease (fcntl(2), F_SETLEASE) is granted exactly while no writer has the file open, and is given back at once. A
process that opens the file for writing in between waits that long, or gets EWOULDBLOCK if it opened without
blocking; readers notice nothing.
"""

import fcntl
import os
import signal

from crust.host.files.held_directory import AnyPath
from crust.host.process import oserrors


def has_writers(path: AnyPath) -> bool:
    """Whether there is a writer, or the filesystem refuses leases on the file; an absent file has none."""
    with oserrors.translating(f"cannot look at {path}"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not _lease(fd)
        finally:
            os.close(fd)


def _lease(fd: int) -> bool:
    # When another process opens the file meanwhile, the kernel signals us; the default signal would end this process.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
