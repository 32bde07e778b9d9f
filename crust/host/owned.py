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

from crust.host import oserrors

_FS_IOC_FIEMAP = 0xC020660B  # _IOWR('f', 11, struct fiemap)
_HEAD = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_LAST, _SHARED = 0x1, 0x2000
_BATCH = 256
_BLOCK_BYTES = 512


def owned_bytes(path: str) -> int:
    """The bytes that only this file has; raises `NotFound`."""
    with oserrors.translating(f"cannot measure {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return sum(_owned(fd))
        except OSError as err:
            if err.errno not in (errno.EOPNOTSUPP, errno.ENOTTY):
                raise
            return os.fstat(fd).st_blocks * _BLOCK_BYTES
        finally:
            os.close(fd)


def _owned(fd: int) -> Iterator[int]:
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
            if not flags & _SHARED:
                yield length
            if flags & _LAST:
                return
        if not count:
            return
