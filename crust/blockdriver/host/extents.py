"""The parts of a file that hold data, the parts of two files that are different blocks, and the bytes of many files.

`allocated` leaves out holes and what was reserved and never written, which read as zeros: by FIEMAP, whose answer has
hundreds of parts, and by SEEK_DATA where the filesystem has no FIEMAP. `differing` compares where the blocks of two
files are (FIEMAP): blocks that both share by reference are equal, and no byte is read. That is exact as long as
neither file changes. Blocks without a known position (compressed, inline, not yet allocated) count as different: the
result may be too large, and is never too small.

A tenant that writes every second block of its volume decides how many parts there are. So each list is a generator,
which holds one batch of FIEMAP of each file and no list of all parts, can begin at any byte, and rests after a batch.

`Occupied` counts each byte of the device once, however many files share it, which neither st_blocks nor statvfs(3)
says. A part whose place or size on the device is not known (compressed, encrypted, not yet allocated) may take
nothing or all of its length: the sum has a lower bound and an upper one. `sharing` says which files share blocks.

Source: lseek(2), and Linux Documentation/filesystems/fiemap.rst.
"""

import errno
import os
import struct
import time
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from crust.host.answers import NotSeen
from crust.host.files.durable import AnyPath
from crust.host.process import syscalls

_FS_IOC_FIEMAP = 0xC020660B  # _IOWR('f', 11, struct fiemap)
_HEAD = struct.Struct("=QQIIII")  # start, length, flags, mapped extents, array size, reserved
_EXTENT = struct.Struct("=QQQ16xI12x")  # offset, place, length, flags
_SYNC, _BATCH = 0x1, 512
_REST_S = 0.001
"""The rest after a batch, whose work takes about half of it: other calls get the interpreter at once meanwhile."""
_LAST, _UNWRITTEN = 0x1, 0x800
_PLACE_UNKNOWN = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400
"""FIEMAP_EXTENT_UNKNOWN, DELALLOC, ENCODED, DATA_ENCRYPTED, NOT_ALIGNED, DATA_INLINE, DATA_TAIL."""
_INLINE, _SHARED = 0x200, 0x2000
_MOST_PARTS = 1 << 19
"""A list of so many parts takes 50 MiB and two seconds."""
_UNPLACED = -1
"""The one place of all shared parts whose place is not known: before the device's first byte."""


class Extent(NamedTuple):
    """A part of a file, or of a volume or snapshot, in bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset of the first byte after it."""
        return self.offset + self.length


class _Placed(NamedTuple):
    """A part of a file and its position on the device; None where that is not known."""

    start: int
    end: int
    place: int | None


def allocated(path: AnyPath, start: int = 0) -> Iterator[Extent]:
    """The parts of a file that hold data, ascending, from the byte `start` on. The iterator raises `NotFound`."""
    with (
        syscalls.translating(f"cannot look for the data of {path}"),
        syscalls.closing(_open(path)) as fd,
    ):
        try:
            for part in _written_of(fd, start):
                first = max(part.start, start)
                yield Extent(first, part.end - first)
        except OSError as err:
            if err.errno != errno.EOPNOTSUPP:  # of the first question: tmpfs and NFS have no FIEMAP
                raise
            yield from data_of(fd, start)


def differing(base: AnyPath, target: AnyPath, start: int = 0) -> Iterator[Extent]:
    """The parts of `target` that are not the same blocks as in `base`, or are in one file only; ascending, from the
    byte `start` on.

    Exact if no process writes to either file meanwhile. Otherwise the parts left out were equal at some moment until
    the iterator's end. It raises `NotFound`, and `Unsupported` where the filesystem has no FIEMAP.
    """
    with (
        syscalls.translating(f"cannot compare {base} with {target}"),
        syscalls.closing(_open(base)) as old,
        syscalls.closing(_open(target)) as new,
    ):
        yield from _merged(_differences(_written_of(old, start), _written_of(new, start), start))


def added(base: AnyPath, target: AnyPath) -> Iterator[Extent]:
    """The parts of `differing` that `target` has blocks for. The iterator raises `OSError`."""
    with syscalls.closing(_open(base)) as old, syscalls.closing(_open(target)) as new:
        yield from _differences(_written_of(old, 0), _written_of(new, 0), holes=False)


def _open(path: AnyPath) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def data_of(fd: int, start: int = 0) -> Iterator[Extent]:
    """The parts of an open file that hold data, ascending, from the byte `start` on. Raises `OSError`."""
    end = start
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as err:
            if err.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield Extent(start, end - start)


@dataclass(slots=True)
class Occupied:
    """The bytes that the files of one filesystem have on its device, those that were reserved and never written too.
    Data within the inode does not count.
    """

    _starts: "array[int]" = field(default_factory=lambda: array("Q"))
    _ends: "array[int]" = field(default_factory=lambda: array("Q"))
    _unknown_bytes: int = 0

    def add(self, path: AnyPath, *, shared: bool = True) -> None:
        """Count a file, or what it shares with none. Raises `OSError`, and `NotSeen` for over `_MOST_PARTS` parts."""
        skipped = _INLINE if shared else _INLINE | _SHARED
        with syscalls.closing(_open(path)) as fd:
            for _, place, length, flags in _extents_of(fd, 0):
                if flags & skipped:
                    continue
                if flags & _PLACE_UNKNOWN:
                    self._unknown_bytes += length
                    continue
                if len(self._starts) == _MOST_PARTS:
                    why = f"the files have more than {_MOST_PARTS} parts"
                    raise NotSeen(f"cannot count the blocks of {path}", why=why)
                self._starts.append(place)
                self._ends.append(place + length)

    def least_bytes(self) -> int:
        """Without the parts that are not known."""
        if not self._starts:
            return 0
        begins, stops = sorted(self._starts), sorted(self._ends)
        gaps = sum(max(begin - stop, 0) for begin, stop in zip(begins[1:], stops, strict=False))
        return stops[-1] - begins[0] - gaps

    def most_bytes(self) -> int:
        """With them."""
        return self.least_bytes() + self._unknown_bytes


def sharing(paths: Collection[str]) -> list[set[str]]:
    """The files that share blocks with another file, in groups: two files that share some are in one group.

    A group may be too large: files with shared parts whose place is not known are in one, and after `_MOST_PARTS`
    shared parts it is all files. Raises `OSError`.
    """
    shared: list[tuple[int, int, str]] = []
    for path in paths:
        with syscalls.closing(_open(path)) as fd:
            for _, place, length, flags in _extents_of(fd, 0):
                if flags & _SHARED:
                    is_known = not flags & _PLACE_UNKNOWN
                    known = (place, place + length, path)
                    shared.append(known if is_known else (_UNPLACED, 0, path))
        if len(shared) > _MOST_PARTS:
            return [set(paths)]
    group_of: dict[str, set[str]] = {}
    reach, last = _UNPLACED, ""
    for place, end, path in sorted(shared):
        group = group_of.setdefault(path, {path})
        if place < reach and group is not group_of[last]:
            group |= group_of[last]
            group_of.update(dict.fromkeys(group, group))
        if end > reach:
            reach, last = end, path
    return list({id(group): group for group in group_of.values()}.values())


def _extents_of(fd: int, start: int, flags: int = 0) -> Iterator[tuple[int, int, int, int]]:
    """The offset, the place, the length and the flags of each extent of a file that ends after `start`, ascending.
    With the flag `_SYNC` after the file's dirty pages are written back.

    One tuple for each extent, made by the interpreter itself: a tenant decides how many there are.
    """
    answer = bytearray(_HEAD.size + _BATCH * _EXTENT.size)
    extents = memoryview(answer)[_HEAD.size :]
    last, count = 0, 1
    while count and not last & _LAST:
        if count > 1:
            time.sleep(_REST_S)
        _HEAD.pack_into(answer, 0, start, (1 << 64) - 1 - start, flags, 0, _BATCH, 0)
        syscalls.ioctl(fd, _FS_IOC_FIEMAP, answer)
        _, _, _, count, _, _ = _HEAD.unpack_from(answer)
        for extent in _EXTENT.iter_unpack(extents[: count * _EXTENT.size]):
            yield extent
            offset, _, length, last = extent
            start = offset + length


def _written_of(fd: int, start: int) -> Iterator[_Placed]:
    """The extents within the file's size that hold data: unwritten ones read as zeros."""
    size = os.fstat(fd).st_size
    for begin, place, length, flags in _extents_of(fd, start, _SYNC):
        if begin < size and not flags & _UNWRITTEN:
            known = None if flags & _PLACE_UNKNOWN else place
            yield _Placed(begin, min(begin + length, size), known)


def _differences(
    old: Iterable[_Placed], new: Iterable[_Placed], start: int = 0, *, holes: bool = True
) -> Iterator[Extent]:
    """Walk both maps from one border to the next: between two borders each file has one extent or none. With `holes`
    also where only the old file has one.
    """
    old_runs, new_runs = _runs(old, start), _runs(new, start)
    (old_end, old_shift), (new_end, new_shift) = next(old_runs), next(new_runs)
    while start < _END:
        end = min(old_end, new_end)
        if old_shift != new_shift and (holes or new_shift is not None):
            yield Extent(start, end - start)
        if old_end == end:
            old_end, old_shift = next(old_runs, (_END, None))
        if new_end == end:
            new_end, new_shift = next(new_runs, (_END, None))
        start = end


_END = 1 << 63
"""After every byte of a file."""


def _runs(extents: Iterable[_Placed], start: int) -> Iterator[tuple[int, object]]:
    """Where each extent and each hole ends, from the byte `start` on, and its shift: the distance from a byte's
    offset to its position on the device. None in a hole; unique where it is unknown.
    """
    for extent in extents:
        if extent.start > start:
            yield extent.start, None
        if extent.end > start:
            start = extent.end
            yield start, object() if extent.place is None else extent.place - extent.start
    yield _END, None


def _merged(extents: Iterable[Extent]) -> Iterator[Extent]:
    last: Extent | None = None
    for extent in extents:
        if last is None:
            last = extent
        elif last.end == extent.offset:
            last = Extent(last.offset, last.length + extent.length)
        else:
            yield last
            last = extent
    if last is not None:
        yield last
