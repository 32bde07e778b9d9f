"""Sparse files as the images of volumes and snapshots: created, grown, and given all of their blocks.

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
from crust.host.files import attributes
from crust.host.files.attributes import NO_COPY_ON_WRITE
from crust.host.files.durable import AnyPath
from crust.host.process import syscalls

_KEEP_SIZE, _UNSHARE_RANGE = 0x01, 0x40
_WRITE = os.O_RDWR | os.O_NOFOLLOW


class NotAnImage(errors.Corrupt):
    def __init__(self, path: str) -> None:
        super().__init__(f"{path} is not an image", why="it is not a regular file")


@dataclass(frozen=True, slots=True)
class Space:
    """Total and available bytes of a filesystem. `readonly` when it takes no writes at all."""

    total_bytes: int
    available_bytes: int
    readonly: bool


def create(path: AnyPath, size_bytes: int, *, in_place: bool = False) -> None:
    """Create the image, its content synced. Its name becomes durable with its directory (`publish_directory`).

    With `in_place` btrfs writes over its blocks: without copy-on-write, as an empty file alone can become.
    """
    flags = _WRITE | os.O_CREAT | os.O_EXCL
    with (
        syscalls.translating(f"cannot create the image {path}"),
        syscalls.closing(open_file(path, flags)) as fd,
    ):
        if in_place:
            attributes.change(fd, NO_COPY_ON_WRITE, NO_COPY_ON_WRITE)
        os.ftruncate(fd, size_bytes)
        os.fsync(fd)


def grow(path: AnyPath, size_bytes: int) -> int:
    """Make the image at least `size_bytes` large, durably; returns its size."""
    with _opened(path, f"cannot grow the image {path}") as fd:
        size = os.fstat(fd).st_size
        if size < size_bytes:
            os.ftruncate(fd, size_bytes)
        os.fsync(fd)
        return max(size, size_bytes)


def allocate(path: AnyPath, start: int, end: int, *, is_clone: bool = False) -> None:
    """Give a part of the image its blocks, durably; its size stays. Written parts keep their content.

    A part that it shares with another file is no block of its own: `is_clone` copies it. xfs must have as many blocks
    free as the part has, also where they are allocated. After an error the image may have some blocks more, also
    beyond its size.
    """
    with _opened(path, f"cannot allocate the blocks of {path}") as fd:
        mode = _KEEP_SIZE | _UNSHARE_RANGE if is_clone else _KEEP_SIZE
        syscalls.fallocate(fd, mode, start, end - start)
        os.fsync(fd)


def free_beyond_size(path: AnyPath) -> None:
    """Free the blocks beyond the image's size."""
    with _opened(path, f"cannot free blocks of {path}") as fd:
        os.ftruncate(fd, os.fstat(fd).st_size)


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
    with _opened(path, f"cannot look for the data of {path}", os.O_NOFOLLOW) as fd:
        if not os.fstat(fd).st_size:
            return False
        try:
            os.lseek(fd, 0, os.SEEK_DATA)
        except OSError as err:
            if err.errno == errno.ENXIO:
                return True
            raise
        return False


def space(directory: AnyPath) -> Space:
    """The space of the filesystem of `directory`, as an unprivileged writer sees it."""
    with syscalls.translating(f"cannot read the free space of {directory}"):
        status = os.statvfs(directory)
    return Space(
        total_bytes=status.f_blocks * status.f_frsize,
        available_bytes=status.f_bavail * status.f_frsize,
        readonly=bool(status.f_flag & os.ST_RDONLY),
    )


def names(directory: AnyPath, suffix: str) -> Iterator[str]:
    """The names of a directory's images, without `suffix`."""
    with syscalls.translating(f"cannot list {directory}"), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False):
                yield entry.name.removesuffix(suffix)


@contextmanager
def _opened(path: AnyPath, what: str, flags: int = _WRITE) -> Iterator[int]:
    with syscalls.translating(what), syscalls.closing(open_file(path, flags)) as fd:
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
    # wait, after a check that it is a regular file, by a descriptor of the file that was checked
    with syscalls.closing(os.open(path, os.O_PATH | flags & os.O_NOFOLLOW)) as path_fd:
        if not stat.S_ISREG(os.fstat(path_fd).st_mode):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
        return os.open(f"/proc/self/fd/{path_fd}", flags & ~(os.O_CREAT | os.O_NOFOLLOW))
