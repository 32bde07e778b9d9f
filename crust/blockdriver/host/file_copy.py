"""Copies of files: by reference where the filesystem can (FICLONE), else segment by segment.

A clone takes 2 ms whatever the size, and is a point-in-time copy: xfs and btrfs block writers meanwhile. On other
filesystems only the data that SEEK_DATA finds is copied, because copy_file_range(2) of the complete file allocates
its holes. Such a copy takes time in proportion to the data, and may contain later writes to the source: `clones`
says which kind a directory gives.

The copy is made under a temporary name, synced, and renamed, so it appears atomically. The caller syncs its name.
`durable.remove_temporary_files` removes the temporary file that a crash leaves.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from crust.blockdriver.host import extents
from crust.core import errors
from crust.host.files import attributes, durable
from crust.host.process import syscalls

_FICLONE = 0x40049409  # _IOW(0x94, 9, int)
_CHUNK_BYTES = 64 * 1024 * 1024
_NO_CLONES = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL)


def clones(directory: durable.AnyPath) -> bool:
    """Whether files of `directory` can be cloned by reference; tried with two empty files."""
    with syscalls.translating(f"cannot try to clone in {directory}"):
        names = [durable.temporary_name(os.path.join(directory, "probe")) for _ in range(2)]
        try:
            with _created(names[0]) as source, _created(names[1]) as target:
                return _clone(source, target)
        finally:
            for name in names:
                durable.remove(name, survives_power_cut=False)


def copy(
    source: durable.AnyPath,
    target: durable.AnyPath,
    *,
    least_bytes: int,
    grow_to_bytes: int = 0,
    mode: int = 0o600,
    at_once: bool = False,
) -> None:
    """Make `target` a copy of `source`, its content synced, replacing any file there; its name is not synced.

    The source must have `least_bytes`; the copy ends with a hole up to `grow_to_bytes`. Both files must be on one
    filesystem. With `at_once` the copy is a clone or is refused, for a source that is being written to. Raises
    `SourceTooShort`, `FileNotCloneable`, `NotFound`, `Exhausted`.
    """
    temporary = durable.temporary_name(target)
    with syscalls.translating(f"cannot copy {source} to {target}"):
        try:
            with (
                syscalls.closing(
                    os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                ) as source_fd,
                _created(temporary) as copy_fd,
            ):
                status = os.fstat(source_fd)
                size_bytes = status.st_size
                if not stat.S_ISREG(status.st_mode) or size_bytes < least_bytes:
                    raise errors.Corrupt.named(
                        "SourceTooShort",
                        f"{source} is not copied",
                        why=f"it has {size_bytes} bytes and should have {least_bytes}",
                    )
                if not _clone(source_fd, copy_fd):
                    if at_once:
                        raise errors.NotReady.named(
                            "FileNotCloneable",
                            f"{source} is not copied",
                            why="its filesystem clones files but refused this one",
                        )
                    os.ftruncate(copy_fd, size_bytes)
                    for part in extents.data_of(source_fd):
                        end = min(part.end, size_bytes)
                        _copy_range(source_fd, copy_fd, part.offset, end)
                if grow_to_bytes > size_bytes:
                    os.ftruncate(copy_fd, grow_to_bytes)
                os.fchmod(copy_fd, mode)
                os.fsync(copy_fd)
            os.rename(temporary, target)
        finally:
            durable.remove(temporary, survives_power_cut=False)


def _clone(source: int, target: int) -> bool:
    try:
        # btrfs clones no file with copy-on-write to one without, and takes the change for an empty file alone
        attributes.change(target, attributes.NO_COPY_ON_WRITE, attributes.of(source) or 0)
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as err:
        if err.errno in _NO_CLONES:
            return False
        raise
    return True


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        count = min(_CHUNK_BYTES, end - start)
        copied_bytes = os.copy_file_range(source, target, count, start, start)
        if not copied_bytes:
            raise OSError(errno.EIO, "the file became shorter while it was copied")
        start += copied_bytes


@contextmanager
def _created(path: str) -> Iterator[int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with syscalls.closing(os.open(path, flags, 0o600)) as fd:
        yield fd
