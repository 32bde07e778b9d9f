"""Whether anything has a file open for writing, a loop device included: asked of the file, and not of every device.

A read lease (fcntl(2), F_SETLEASE) is granted exactly while nobody has. It is given back at once. Who opens the file
for writing in between waits that long, or gets EWOULDBLOCK if it will not wait; readers notice nothing.
"""

import fcntl
import os
import signal

from crust.host.process import oserrors


def has_writers(path: str) -> bool:
    """True too where the filesystem has no leases, or the file is not ours to lease; an absent file has none."""
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
    # Who opens the file meanwhile has the kernel tell us, and what it sends by default would end this process.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
