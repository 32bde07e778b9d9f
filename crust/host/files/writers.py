"""Whether a file is open for writing anywhere, loop devices included: one question to the kernel about the file.

A read lease (fcntl(2), F_SETLEASE) is granted exactly while no writer has the file open, and is given back at once.
Readers notice nothing. A process that opens the file for writing in between waits that long; one that opens without
blocking would get EAGAIN, which says nothing about the file, so crust's own writers open by `open_file`.
"""

import errno
import fcntl
import os
import signal
import stat

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


def open_file(path: AnyPath, flags: int, mode: int = 0o600) -> int:
    """open(2) with O_NONBLOCK, so that a pipe does not hang it, which waits until a lease is given back.

    The kernel ends the wait after /proc/sys/fs/lease-break-time (45 s), whoever has the lease. Raises `OSError`.
    """
    try:
        return os.open(path, flags | os.O_NONBLOCK, mode)
    except BlockingIOError:
        return _open_regular(path, flags)


def _open_regular(path: AnyPath, flags: int) -> int:
    """Open with blocking what is certainly a regular file: the descriptor is of the file that was looked at."""
    seen = os.open(path, os.O_PATH | os.O_CLOEXEC | flags & os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(seen).st_mode):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
        return os.open(f"/proc/self/fd/{seen}", flags & ~(os.O_CREAT | os.O_NOFOLLOW))
    finally:
        os.close(seen)


def _lease(fd: int) -> bool:
    # When another process opens the file meanwhile, the kernel signals us; the default signal would end this process.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
