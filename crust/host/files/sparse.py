"""Sparse files as the images of volumes and snapshots: created and grown.

No function makes an image smaller, and none follows a symbolic link.

`has_writers` asks the kernel whether any process or loop device has a file open for writing, by a read lease
(fcntl(2)). The kernel grants it exactly while no writer has the file open, and crust gives it back at once. Readers
notice nothing. A process that opens the file for writing in between waits that long; without blocking it gets EAGAIN,
which says nothing about the file. So crust's own writers open the file by `open_file`.
"""

import errno
import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crust.core import errors
from crust.host.files.durable import AnyPath
from crust.host.process import syscalls

_BLOCK_BYTES = 512
"""The unit of st_blocks, whatever the filesystem's."""


class NotAnImage(errors.Corrupt):
    """An image's path is not a regular file."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is not an image", why="it is not a regular file", hint="check it by hand"
        )


@dataclass(frozen=True, slots=True)
class Space:
    """Total and available bytes of a filesystem. `readonly` when it takes no writes at all."""

    total_bytes: int
    available_bytes: int
    readonly: bool

    @property
    def used_bytes(self) -> int:
        """The bytes that nobody can write any more, the filesystem's own and its reserve for root among them."""
        return self.total_bytes - self.available_bytes


def create(path: AnyPath, size_bytes: int) -> None:
    """Create the image, its content synced. Its name becomes durable with its directory (`publish_directory`)."""
    with syscalls.translating(f"cannot create the image {path}"):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _opened(path, flags) as fd:
            os.ftruncate(fd, size_bytes)
            os.fsync(fd)


def grow(path: AnyPath, size_bytes: int) -> int:
    """Make the image at least `size_bytes` large, durably; returns its size."""
    with (
        syscalls.translating(f"cannot grow the image {path}"),
        _opened(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC) as fd,
    ):
        size = os.fstat(fd).st_size
        if size < size_bytes:
            os.ftruncate(fd, size_bytes)
        os.fsync(fd)
        return max(size, size_bytes)


def size_bytes(path: AnyPath) -> int:
    """The apparent size; raises `NotFound`, `NotAnImage`."""
    with syscalls.translating(f"cannot stat the image {path}"):
        status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise NotAnImage(str(path))
    return status.st_size


def is_hole(path: AnyPath) -> bool:
    """Whether the image is one hole (SEEK_DATA), so that every byte of it reads as zero. False for an empty file.

    Data that only the page cache has counts as data, and so does each byte on a filesystem that cannot tell.
    """
    with (
        syscalls.translating(f"cannot look for the data of {path}"),
        _opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) as fd,
    ):
        if not os.fstat(fd).st_size:
            return False
        try:
            os.lseek(fd, 0, os.SEEK_DATA)
        except OSError as err:
            if err.errno == errno.ENXIO:
                return True
            raise
        return False


def allocated_bytes(path: AnyPath) -> int:
    """The blocks of the image, shared ones included; 0 for an absent one."""
    with syscalls.translating(f"cannot stat the image {path}"):
        try:
            return os.lstat(path).st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            return 0


def space(directory: AnyPath) -> Space:
    """The space of the filesystem of `directory`, as an unprivileged writer sees it."""
    with syscalls.translating(f"cannot read the free space of {directory}"):
        status = os.statvfs(directory)
    return Space(
        total_bytes=status.f_blocks * status.f_frsize,
        available_bytes=status.f_bavail * status.f_frsize,
        readonly=bool(status.f_flag & os.ST_RDONLY),
    )


def allocations(directory: AnyPath) -> dict[str, int]:
    """The blocks of each regular file, in bytes, shared ones included. Raises `OSError`."""
    with os.scandir(directory) as entries:
        files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
        return {
            file.name: file.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES for file in files
        }


def names(directory: AnyPath, suffix: str) -> Iterator[str]:
    """The names of a directory's images, without `suffix`."""
    with syscalls.translating(f"cannot list {directory}"), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False):
                yield entry.name.removesuffix(suffix)


@contextmanager
def _opened(path: AnyPath, flags: int) -> Iterator[int]:
    with syscalls.closing(open_file(path, flags)) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotAnImage(str(path))
        yield fd


def has_writers(path: AnyPath) -> bool:
    """Whether there is a writer, or the filesystem refuses leases on the file; an absent file has none."""
    with syscalls.translating(f"cannot look at {path}"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        with syscalls.closing(fd):
            # When another process opens the file meanwhile, the kernel signals us; the default signal would end this
            # process.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            try:
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            except OSError as err:
                if err.errno not in (errno.EAGAIN, errno.EINVAL):
                    raise
                return True
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def open_file(path: AnyPath, flags: int, mode: int = 0o600) -> int:
    """open(2) that does not hang on a pipe (O_NONBLOCK), and waits until a lease is given back. Raises `OSError`.

    The kernel ends the wait after /proc/sys/fs/lease-break-time (45 s).
    """
    try:
        return os.open(path, flags | os.O_NONBLOCK, mode)
    except OSError as err:
        if err.errno != errno.EAGAIN:
            raise
        return _open_regular(path, flags)


def _open_regular(path: AnyPath, flags: int) -> int:
    """Open with blocking, after a check that it is a regular file, by a descriptor of the file that was checked."""
    with syscalls.closing(os.open(path, os.O_PATH | flags & os.O_NOFOLLOW)) as path_fd:
        if not stat.S_ISREG(os.fstat(path_fd).st_mode):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
        return os.open(f"/proc/self/fd/{path_fd}", flags & ~(os.O_CREAT | os.O_NOFOLLOW))
