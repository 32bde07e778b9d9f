"""How much of a filesystem a file has to itself: its blocks without those that it shares with copies by reference.

st_blocks counts a shared block in every file that has it, so a sum of it promises room that the next write to any of
them takes. FIEMAP tells which extents are shared; a filesystem without it (tmpfs) shares none. What was not placed
yet counts as the file's own. Nothing is flushed for the question.

Source: Linux Documentation/filesystems/fiemap.rst.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from crust.host import oserrors

_FS_IOC_FIEMAP = 0xC020660B  # _IOWR('f', 11, struct fiemap)
_HEAD = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_LAST, _SHARED = 0x1, 0x2000
_BATCH = 256
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class Owned:
    """The bytes that only one file has, and whether there are others that it shares."""

    size_bytes: int
    shares: bool


def owned(path: str) -> Owned:
    """What only this file has; raises `NotFound`."""
    with oserrors.translating(f"cannot measure {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _sum(fd)
        except OSError as err:
            if err.errno not in (errno.EOPNOTSUPP, errno.ENOTTY):
                raise
            return Owned(os.fstat(fd).st_blocks * _BLOCK_BYTES, shares=False)
        finally:
            os.close(fd)


def _sum(fd: int) -> Owned:
    own, shares = 0, False
    for length, shared in _extents(fd):
        own += 0 if shared else length
        shares = shares or shared
    return Owned(own, shares)


def _extents(fd: int) -> Iterator[tuple[int, bool]]:
    """The length of each extent, and whether another file has it too."""
    position = 0
    while True:
        head = _HEAD.pack(position, (1 << 64) - 1 - position, 0, 0, _BATCH, 0)
        answer = bytearray(head + bytes(_BATCH * _EXTENT.size))
        fcntl.ioctl(fd, _FS_IOC_FIEMAP, answer)
        count = _HEAD.unpack_from(answer)[3]
        for number in range(count):
            extent = _EXTENT.unpack_from(answer, _HEAD.size + number * _EXTENT.size)
            start, length, flags = extent[0], extent[2], extent[5]
            position = start + length
            yield length, bool(flags & _SHARED)
            if flags & _LAST:
                return
        if not count:
            return
