"""The parts of a file that hold data, and the parts of two files that are different blocks.

`allocated` uses SEEK_DATA: a hole, or a part that was reserved and never written, reads as zeros. `differing`
compares where the blocks of two files are (FIEMAP): blocks that both share by reference are equal, and no byte is
read. That is exact as long as neither file changes. Blocks without a known position (compressed, inline, not yet
allocated) count as different: the result may be too large, and is never too small.

Source: lseek(2), and Linux Documentation/filesystems/fiemap.rst.
"""

import bisect
import errno
import fcntl
import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from crust.host.files.durable import AnyPath
from crust.host.process import syscalls

_FS_IOC_FIEMAP = 0xC020660B  # _IOWR('f', 11, struct fiemap)
_HEAD = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_SYNC, _BATCH = 0x1, 512
_LAST, _UNWRITTEN = 0x1, 0x800
_PLACE_UNKNOWN = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400
"""FIEMAP_EXTENT_UNKNOWN, DELALLOC, ENCODED, DATA_ENCRYPTED, NOT_ALIGNED, DATA_INLINE, DATA_TAIL."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A part of a file, in bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset of the first byte after it."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class _Placed:
    """A part of a file and its position on the device; None where that is not known."""

    start: int
    end: int
    place: int | None


def allocated(path: AnyPath) -> tuple[Extent, ...]:
    """The parts of a file that hold data, ascending. Raises `NotFound`."""
    with (
        syscalls.translating(f"cannot look for the data of {path}"),
        syscalls.closing(_open(path)) as fd,
    ):
        return tuple(data_of(fd))


def differing(base: AnyPath, target: AnyPath) -> tuple[Extent, ...]:
    """The parts of `target` that are not the same blocks as in `base`, or are in one file only; ascending.

    Exact if no process writes to either file meanwhile. Otherwise the parts left out were equal at some moment during
    the call. Raises `NotFound`, and `Unsupported` where the filesystem has no FIEMAP.
    """
    with syscalls.translating(f"cannot compare {base} with {target}"):
        old, new = (_placed_of(path) for path in (base, target))
    return tuple(_merged(_differences(old, new)))


def _open(path: AnyPath) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def data_of(fd: int) -> Iterator[Extent]:
    """The parts of an open file that hold data, ascending. Raises `OSError`."""
    end = 0
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as err:
            if err.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield Extent(start, end - start)


def _placed_of(path: AnyPath) -> list[_Placed]:
    """The extents of a file, ascending, after its dirty pages are written back."""
    placed: list[_Placed] = []
    with syscalls.closing(_open(path)) as fd:
        size, end, flags, count = os.fstat(fd).st_size, 0, 0, 1
        while count and end < size and not flags & _LAST:
            answer = bytearray(_HEAD.size + _BATCH * _EXTENT.size)
            _HEAD.pack_into(answer, 0, end, (1 << 64) - 1 - end, _SYNC, 0, _BATCH, 0)
            fcntl.ioctl(fd, _FS_IOC_FIEMAP, answer)
            count = _HEAD.unpack_from(answer)[3]
            for number in range(count):
                fields = _EXTENT.unpack_from(answer, _HEAD.size + number * _EXTENT.size)
                start, place, flags = fields[0], fields[1], fields[5]
                end = start + fields[2]
                if start < size and not flags & _UNWRITTEN:  # unwritten reads as zeros
                    position = None if flags & _PLACE_UNKNOWN else place
                    placed.append(_Placed(start, min(end, size), position))
    return placed


def _differences(old: list[_Placed], new: list[_Placed]) -> Iterator[Extent]:
    """Walk both maps from one border to the next: between two borders each file has one extent or none."""
    borders = sorted({border for extent in (*old, *new) for border in (extent.start, extent.end)})
    for start, end in itertools.pairwise(borders):
        if _shift_at(old, start) != _shift_at(new, start):
            yield Extent(start, end - start)


def _shift_at(extents: list[_Placed], offset: int) -> object:
    """The distance from a byte's offset to its position on the device; None in a hole; unique where it is unknown."""
    number = bisect.bisect_right(extents, offset, key=lambda extent: extent.start) - 1
    if number < 0 or extents[number].end <= offset:
        return None
    place = extents[number].place
    return object() if place is None else place - extents[number].start


def _merged(extents: Iterable[Extent]) -> list[Extent]:
    merged: list[Extent] = []
    for extent in extents:
        if merged and merged[-1].end == extent.offset:
            merged[-1] = Extent(merged[-1].offset, merged[-1].length + extent.length)
        else:
            merged.append(extent)
    return merged
