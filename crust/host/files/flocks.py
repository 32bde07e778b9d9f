"""Whole-file locks by flock(2), which the kernel releases when the holder dies.

A lock belongs to the open file description, not to the process: a child that inherits the descriptor keeps the lock
after its parent died. `ProcessLock` is therefore closed on exec. A lock that is to live as long as a child process is
taken with `try_lock` on a descriptor which that process inherits.

A lock file is never unlinked: two processes could then each hold a lock on a file of that name.
"""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from crust.core import errors
from crust.host.process import oserrors


class LockHeld(errors.NotReady):
    """Another process holds the lock."""

    def __init__(self, path: str, pids: Sequence[int]) -> None:
        holder = (
            f"process {', '.join(map(str, pids))} holds it" if pids else "another process holds it"
        )
        super().__init__(f"{path} is locked", why=holder, hint="stop that process first")
        self.path = path
        self.pids = tuple(pids)


class ProcessLock:
    """An exclusive lock of this process on a file, held until `close` or death."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def acquire(cls, path: str | os.PathLike[str]) -> Self:
        """Lock the file `path`, creating it if absent; raises `LockHeld` at once, never waits."""
        path = os.fspath(path)
        with oserrors.translating(f"cannot lock {path}"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if not try_lock(fd):
                    raise LockHeld(path, holder_pids(path))
                _note_pid(fd)
            except BaseException:
                os.close(fd)
                raise
        return cls(path, fd)

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._fd < 0:
            return
        unlock(self._fd)
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def try_lock(fd: int) -> bool:
    """Lock an open file description exclusively; False if another one has the lock. Never waits."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        raise oserrors.translate(err, "cannot lock a file") from err
    return True


def unlock(fd: int) -> None:
    """Release the lock for all descriptors of the description.

    Closing alone would not do: a child that is between fork and exec still has a copy.
    """
    with oserrors.translating("cannot unlock a file"):
        fcntl.flock(fd, fcntl.LOCK_UN)


def holder_pids(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """The processes that took flocks on `path` (proc_locks(5)); best effort, for messages only.

    Empty when the taker lives in another PID namespace. The taker may be dead while a child keeps the lock.
    """
    try:
        status = os.stat(path)
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return ()
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    fields = (line.split() for line in lines if "->" not in line)
    pids = {int(field[4]) for field in fields if field[1] == "FLOCK" and field[5] == wanted}
    return tuple(sorted(pid for pid in pids if pid > 0))


def _note_pid(fd: int) -> None:
    # For a person who reads the file; crust does not.
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
