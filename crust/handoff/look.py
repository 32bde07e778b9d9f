"""Looks at the handoff directory again and again, and reads only what may have changed.

Every change of an entry changes its directory (H-31, and every rename does), so an entry whose directory has the same
inode and time is not read again. The time has the resolution of a kernel tick, so a fresh one proves nothing: such an
entry is read once more. A sandbox that dies changes nothing: locks of live claims are queried at every look.
And a few entries are read in turn whatever they say, so a file that was damaged in place is noticed too.

Of a directory with 1,000 entries at rest a look takes 3 to 8 ms, where reading them all takes 90. One thread at a
time.
"""

import os
import time
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from crust.handoff import claims, entry, layout
from crust.handoff.entry import Entry, UnknownHandoffFile
from crust.handoff.layout import Layout, NameKind
from crust.host.process import oserrors

FRESH_NS = 100_000_000
"""A directory that changed so recently may change again without getting another time."""

IN_TURN = 2
"""The number of unchanged entries that a look reads."""

LOCKS_IN_TURN = 100
"""The number of live claims whose locks a look queries. What must be certain (an unpublish) queries its own."""

_Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Look:
    """What a look found: the names of all entries, and those entries that were read now."""

    names: Set[str]
    read: Mapping[str, Entry]


class Looks:
    """The looks at one directory."""

    def __init__(self, root: Layout) -> None:
        self._layout = root
        self._entries: dict[str, Entry] = {}
        self._stamps: dict[str, _Stamp] = {}
        self._live: set[str] = set()
        self._turn = _Turn(IN_TURN)
        self._live_turn = _Turn(LOCKS_IN_TURN)

    def forget(self, names: Iterable[str]) -> None:
        """Read these entries at the next look."""
        for name in names:
            self._stamps.pop(name, None)

    def look(self) -> Look:
        """Look now. Blocks."""
        fresh_ns = time.time_ns() - FRESH_NS
        there = self._names()
        stamps = self._stamps
        names = {name for name, stamp in there.items() if stamps.get(name) != stamp}
        names.update(self._ended(), self._turn.next(there))
        read = {name: entry for name in names if (entry := self._read(name)) is not None}
        for name in names | (self._entries.keys() - there.keys()):
            self._forget(name)
        for name, entry in read.items():
            self._entries[name] = entry
            if entry.live:
                self._live.add(name)
            if not _has_error(entry) and name in there and there[name][1] < fresh_ns:
                self._stamps[name] = there[name]
        return Look(self._entries.keys(), read)

    def _forget(self, name: str) -> None:
        self._entries.pop(name, None)
        self._stamps.pop(name, None)
        self._live.discard(name)

    def _ended(self) -> list[str]:
        """Entries, unchanged perhaps, whose claim has died."""
        asked = self._live_turn.next(self._live)
        return [name for name in asked if not claims.is_held(self._layout.entry(name))]

    def _names(self) -> dict[str, _Stamp]:
        root = self._layout.root
        with oserrors.translating(f"cannot list {root}"):
            try:
                directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return {}
            try:
                return _stamps_in(directory)
            finally:
                os.close(directory)

    def _read(self, name: str) -> Entry | None:
        if layout.kind_in_root(name) is NameKind.UNKNOWN:
            path = f"{self._layout.root}/{name}"
            return Entry(name, path, None, UnknownHandoffFile(path))
        return entry.read(self._layout.entry(name))


def _stamps_in(directory: int) -> dict[str, _Stamp]:
    """By name. Below a descriptor, because the walk to the root takes longer than the rest of a stat(2); and without
    os.scandir, which keeps all that it finds alive, for a garbage collector to go through.
    """
    stamps = {}
    for name in os.listdir(directory):
        if layout.is_hidden(name):
            continue
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:  # unpublished just now
            continue
        stamps[name] = (status.st_ino, status.st_mtime_ns)
    return stamps


class _Turn:
    """Goes round a changing set of names, some at a time."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._left: list[str] = []

    def next(self, names: Collection[str]) -> list[str]:
        """The next names of the round, those that are still there."""
        if not self._left:
            self._left = list(names)
        picked, self._left = self._left[: self._number], self._left[self._number :]
        return [name for name in picked if name in names]


def _has_error(entry: Entry | None) -> bool:
    """Whether the reason may pass without a change of the entry: no descriptor or no memory was left."""
    return entry is not None and (entry.error is not None or entry.claim_error is not None)
