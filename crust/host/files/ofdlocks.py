"""Open file description locks, fcntl(2) F_OFD_SETLK: a lock that lives as long as any copy of its descriptor.

Like a flock(2) it is inherited over fork, exec and SCM_RIGHTS and ends when the last copy of the descriptor is
closed. Unlike a flock it can be tested (F_OFD_GETLK) without being taken: a test that takes the lock for a moment
makes another process's attempt in that moment fail. /proc/locks is no substitute: inside a PID namespace it hides a
lock whose taker is dead, and a lock that a virtual machine inherited is one of those.
"""

import fcntl
import os
import struct

from crust.host.process import oserrors

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock on 64-bit Linux: type, whence, start, length (0: to the end), pid (0 for these commands)."""


def try_lock(fd: int) -> bool:
    """Take the exclusive lock on the file behind `fd`, opened for writing; False if it is held. Never waits."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, None))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as POSIX lets a system choose
        return False
    except OSError as err:
        raise oserrors.translate(err, "cannot lock a file") from err
    return True


def hold_shared(fd: int, *, at: int) -> None:
    """Lock the byte `at` against `try_lock` and `is_locked` of others; `fd` may be read-only. Never waits."""
    with oserrors.translating("cannot lock a file"):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, at))


def unlock(fd: int, *, at: int | None = None) -> None:
    """Release the lock, of the byte `at` or of the file, for every copy of the descriptor."""
    with oserrors.translating("cannot unlock a file"):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, at))


def is_locked(fd: int, *, at: int | None = None) -> bool:
    """Whether another open file description holds a lock; `fd` may be read-only, and nothing is taken."""
    asked = _flock(fcntl.F_WRLCK, at)
    with oserrors.translating("cannot ask about a lock"):
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


def _flock(kind: int, at: int | None) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, at or 0, 0 if at is None else 1, 0)
