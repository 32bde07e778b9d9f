"""The file claim.lock of an entry: created with it, and opened only if no other user may write to it.

A lock on it belongs to the open file description (`crust.host.files.ofdlocks`): copies of the descriptor hold it too.
"""

import fcntl
import os
import stat

from crust.core import errors
from crust.handoff import layout
from crust.host.files import ofdlocks
from crust.host.process import oserrors


class UntrustedLock(errors.Refused):
    """claim.lock is not the file that the proxy created."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} is not used as a lock", why=why, hint="find out who replaced it")
        self.path = path


def create(path: str) -> None:
    """Create the lock file of a new entry."""
    with oserrors.translating(f"cannot create {path}"):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(path, flags, layout.FILE_MODE))


def open_existing(path: str, access: int) -> int | None:
    """Open the lock file, never create it; None if there is none."""
    with oserrors.translating(f"cannot open {path}"):
        try:
            fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
    try:
        _check(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedLock(path, "it is not a regular file")
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise UntrustedLock(path, "other users may write to it")
    if status.st_nlink > 1:
        raise UntrustedLock(path, "it has a second hard link")


def holds(fd: int) -> bool:
    """Whether the description behind `fd` has the lock, which the caller knows to be held by somebody."""
    is_writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    return is_writable and ofdlocks.try_lock(fd)


def is_at(path: str, fd: int) -> bool:
    """Whether the path still names the locked file."""
    with oserrors.translating(f"cannot look at {path}"):
        try:
            there = os.lstat(path)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(fd))
