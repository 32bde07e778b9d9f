"""Which parts of a file hold data, and which parts of two files are different blocks.

`allocated` uses SEEK_DATA: a hole, or a part that was reserved and never written, reads as zeros. `differing`
compares where the blocks of two files are (FIEMAP): blocks that both share by reference are equal, and no byte is
read. That is exact as long as neither file changes. Blocks without a known position (compressed, inline, not yet
allocated) count as different, so an error can only report too much.

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
from typing import NamedTuple

from crust.host.files.held_directory import AnyPath
from crust.host.process import oserrors, syscalls


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
        oserrors.translating(f"cannot look for the data of {path}"),
        syscalls.closing(_open(path)) as fd,
    ):
        return tuple(data_of(fd))


def differing(base: AnyPath, target: AnyPath) -> tuple[Extent, ...]:
    """The parts of `target` that are not the same blocks as in `base`, or are in one file only; ascending.

    Exact if neither file is written to meanwhile. If one is, the parts left out were equal at some moment during
    the call. Raises `NotFound`, and `Unsupported` where the filesystem has no FIEMAP.
    """
    with oserrors.translating(f"cannot compare {base} with {target}"):
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
    with syscalls.closing(_open(path)) as fd:
        return list(_placed(fd))


def _placed(fd: int) -> Iterator[_Placed]:
    size = os.fstat(fd).st_size
    for start, place, length, flags in extents(fd):
        if start >= size:
            return
        if not flags & UNWRITTEN:  # reads as zeros, as a hole does
            known = None if flags & PLACE_UNKNOWN else place
            yield _Placed(start, min(start + length, size), known)


def _differences(old: list[_Placed], new: list[_Placed]) -> Iterator[Extent]:
    """Walk both maps from one border to the next: between two borders each file has one extent or none."""
    borders = sorted({border for each in (*old, *new) for border in (each.start, each.end)})
    for start, end in itertools.pairwise(borders):
        if _shift_at(old, start) != _shift_at(new, start):
            yield Extent(start, end - start)


def _shift_at(extents: list[_Placed], offset: int) -> object:
    """How far a byte of a file is moved on the device: None in a hole; equal to nothing where it is not known."""
    number = bisect.bisect_right(extents, offset, key=lambda each: each.start) - 1
    if number < 0 or extents[number].end <= offset:
        return None
    place = extents[number].place
    return object() if place is None else place - extents[number].start


def _merged(extents: Iterable[Extent]) -> Iterator[Extent]:
    pending: Extent | None = None
    for each in extents:
        if pending is not None and pending.end == each.offset:
            pending = Extent(pending.offset, pending.length + each.length)
            continue
        if pending is not None:
            yield pending
        pending = each
    if pending is not None:
        yield pending


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
