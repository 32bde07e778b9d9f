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
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as POSIX lets a system choose
        return False
    except OSError as err:
        raise oserrors.translate(err, "cannot lock a file") from err
    return True


def unlock(fd: int) -> None:
    """Release the lock for every copy of the descriptor."""
    with oserrors.translating("cannot unlock a file"):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def is_locked(fd: int) -> bool:
    """Whether another open file description holds the lock; `fd` may be read-only, and nothing is taken."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with oserrors.translating("cannot ask about a lock"):
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK
