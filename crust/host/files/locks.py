"""File locks: open file description locks, fcntl(2) F_OFD_SETLK, which live as long as any copy of their descriptor.

Such a lock is inherited over fork, exec and SCM_RIGHTS, and ends when the last copy of the descriptor is closed. It
can be tested (F_OFD_GETLK) without being taken: a test that takes the lock for a moment makes another process's
attempt in that moment fail. /proc/locks is no substitute: inside a PID namespace it hides a lock whose taker is dead,
as it is for a lock that a virtual machine inherited. `open_files.holders` finds the processes that have a lock.

`ProcessLock` is the lock of one process on a file. `ToolLocks` has a lock per volume that lives as long as any
program that a process of crust has started on the volume's device. A killed process leaves its mkfs or e2fsck
running, perhaps stuck on a slow disk, and some do not hold the device exclusively: mkfs.btrfs writes through a plain
descriptor. So each program inherits two descriptors: a lock, and the open device. The driver stages, publishes and
gives back the volume only after the last copy of the lock is closed. The kernel detaches the device for another
volume only after the last copy of the open device is closed.

A lock file is never unlinked: two processes could then each hold a lock on a file of that name.
"""

import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Self

from crust.core import errors
from crust.host.files.durable import Place
from crust.host.process import open_files, syscalls

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock on 64-bit Linux: type, whence, start, length (0: to the end), pid (0 for these commands)."""
_OFFSET_BYTES = 7
"""A file offset has 63 bits."""


def try_lock(fd: int) -> bool:
    """Take the exclusive lock on the file of `fd`, opened for writing; False if it is held. Never waits."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, None))
    except OSError as err:
        if err.errno == errno.EAGAIN:
            return False
        raise syscalls.translate(err, "cannot lock a file") from err
    return True


def unlock(fd: int, *, at: int | None = None) -> None:
    """Release the lock, of the byte `at` or of the file, for every copy of the descriptor.

    Closing is not enough: a child that is between fork and exec still has a copy.
    """
    with syscalls.translating("cannot unlock a file"):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, at))


def is_locked(fd: int, *, at: int | None = None) -> bool:
    """Whether another open file description holds a lock; `fd` may be read-only; takes no lock."""
    with syscalls.translating("cannot ask about a lock"):
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, at))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


def _flock(kind: int, at: int | None) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, at or 0, 0 if at is None else 1, 0)


class LockHeld(errors.NotReady):
    def __init__(self, path: str, pids: Sequence[int]) -> None:
        holder = f"process {', '.join(map(str, pids))}" if pids else "another process"
        super().__init__(f"{path} is locked", why=f"{holder} holds it")


@dataclass(eq=False)
class ProcessLock(AbstractContextManager["ProcessLock"]):
    """An exclusive lock of this process on a file, held until `close` or death. No child inherits it."""

    _fd: int

    @classmethod
    def acquire(cls, path: str | os.PathLike[str]) -> Self:
        """Lock the file `path`, creating it if absent; raises `LockHeld` at once, never waits.

        The search for the holder looks at the open files of all processes.
        """
        lock = cls.try_acquire(path)
        if lock is None:
            raise LockHeld(str(path), open_files.holders(path))
        return lock

    @classmethod
    def try_acquire(cls, path: str | os.PathLike[str]) -> Self | None:
        """`acquire`, or None without a search for the holder."""
        with syscalls.translating(f"cannot lock {path}"):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = cls(os.open(path, flags, 0o600))
            try:
                if not try_lock(lock._fd):
                    lock.close()
                    return None
                os.ftruncate(lock._fd, 0)
                os.pwrite(lock._fd, f"{os.getpid()}\n".encode("ascii"), 0)  # for a person
            except BaseException:
                lock.close()
                raise
        return lock

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._fd >= 0:
            unlock(self._fd)
            os.close(self._fd)
            self._fd = -1

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ToolLocks:
    """The locks of volumes, in the file `path`. Methods block.

    One file of no size serves all volumes: a volume's lock is one byte of it, at an offset made from its id. The lock
    is shared and the file open for reading only, because a confined program gets it too; it can lock no other byte,
    because `confined` allows it no command that locks. A shared lock is enough: the file has one owner at a time (the
    driver of the pool, the proxy of the run directory), and this owner asks only whether a program is left.
    """

    path: Place

    @contextmanager
    def taking(self, volume: str) -> Iterator[int]:
        """Lock the volume for the programs that run on it in the block; they inherit the descriptor.

        Raises `VolumeInUseByTool`. After an error a program may be left: the lock then ends with its last copy.
        """
        flags = os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with syscalls.translating(f"cannot open {self.path}"):
            fd = os.open(self.path, flags, 0o600)
        with syscalls.closing(fd):
            at = _free_byte(fd, volume)
            with syscalls.translating("cannot lock a file"):
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, at))
            yield fd
            # All programs have ended; a child of another volume that has not executed yet may have a copy.
            unlock(fd, at=at)

    def check_free(self, volume: str) -> None:
        """Raise `VolumeInUseByTool` if a program runs on the volume; take no lock."""
        with syscalls.translating(f"cannot open {self.path}"):
            try:  # usually it is absent, and creating a CrustError costs more than this call
                fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:  # no program was ever started
                return
        with syscalls.closing(fd):
            _free_byte(fd, volume)


def _free_byte(fd: int, volume: str) -> int:
    """The offset of the volume's lock in the file. Raises `VolumeInUseByTool` while a program has the lock."""
    at = int.from_bytes(hashlib.sha256(volume.encode()).digest()[:_OFFSET_BYTES])
    if is_locked(fd, at=at):
        raise errors.PeerUnavailable.named(
            "VolumeInUseByTool",
            f"{volume} is still in use",
            why="a program that crust has started on it, mkfs or e2fsck, has not ended",
        )
    return at
