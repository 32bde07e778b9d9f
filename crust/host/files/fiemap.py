"""Where the blocks of a file lie, from its filesystem (FIEMAP).

Raw: `OSError` passes to the callers, who know what each errno means to them.

Source: Linux Documentation/filesystems/fiemap.rst.
"""

import fcntl
import struct
from collections.abc import Iterator
from typing import NamedTuple

LAST, UNWRITTEN = 0x1, 0x800
PLACE_UNKNOWN = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400
"""FIEMAP_EXTENT_UNKNOWN, DELALLOC, ENCODED, DATA_ENCRYPTED, NOT_ALIGNED, DATA_INLINE, DATA_TAIL."""

_FS_IOC_FIEMAP = 0xC020660B  # _IOWR('f', 11, struct fiemap)
_HEAD = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_SYNC = 0x1
_BATCH = 512


class Mapped(NamedTuple):
    """An extent: its place in the file, its place on the disk, and flags; bytes."""

    start: int
    place: int
    length: int
    flags: int


def extents(fd: int) -> Iterator[Mapped]:
    """The extents of a file, ascending, after what was not written back yet is."""
    position = 0
    while batch := _ask(fd, position):
        yield from batch
        if batch[-1].flags & LAST:
            return
        position = batch[-1].start + batch[-1].length


def _ask(fd: int, start: int) -> list[Mapped]:
    head = _HEAD.pack(start, (1 << 64) - 1 - start, _SYNC, 0, _BATCH, 0)
    answer = bytearray(head + bytes(_BATCH * _EXTENT.size))
    fcntl.ioctl(fd, _FS_IOC_FIEMAP, answer)
    count = _HEAD.unpack_from(answer)[3]
    fields = (_EXTENT.unpack_from(answer, _HEAD.size + n * _EXTENT.size) for n in range(count))
    return [Mapped(each[0], each[1], each[2], each[5]) for each in fields]
