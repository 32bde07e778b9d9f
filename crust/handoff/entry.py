"""Reads the handoff directory: one entry, all entries once, or, at each look, the entries that may have changed.

Reading takes no lock and changes nothing. A missing directory, and a directory without a record (H-11), are absent.
Any other unreadable entry is an entry with an error, because an unknown volume is not an absent one.

Every change of an entry changes its directory (H-31, and every rename does), so a look does not read an entry again
whose directory has the same inode and time. The time has the resolution of a kernel tick, so a fresh time proves
nothing: a look reads such an entry once more. A sandbox that dies changes nothing: each look queries the locks of
live claims. Each look also reads a few unchanged entries in turn, so it notices a file that was damaged in place. A
look at 1,000 entries at rest takes 3 to 8 ms; reading them all takes 90 ms.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from crust.core import errors
from crust.handoff import claims, layout
from crust.handoff import record as records
from crust.handoff.claims import Claim
from crust.handoff.layout import EntryPaths, Layout
from crust.handoff.mount_info_models import Reserved, reserved
from crust.handoff.record import Record
from crust.host.files import durable, listing
from crust.host.process import syscalls

_Stamp = tuple[int, int]
"""The inode and the time of an entry's directory."""

FRESH_NS = 100_000_000
"""A directory that changed so recently may change again without getting another time."""

IN_TURN = 2
"""The number of unchanged entries that a look reads."""

LOCKS_IN_TURN = 100
"""The number of live claims whose locks a look queries. An unpublish, which must be certain, queries its own."""


class UnknownHandoffFile(errors.Corrupt):
    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} has no meaning in the handoff directory",
            why="the specification does not define this name",
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in the root as it was read: a readable record, or the error.

    `claim_error` says why claim.json could not be read; the record is still valid. `unknown` are unknown names
    inside the entry. `digest` is the entry's name, or the unknown name in the root. `reserved` is the volume and the
    device that an unreadable entry blocks; if it or its device is None, the entry blocks everything.
    """

    digest: str
    directory: str
    record: Record | None
    error: errors.CrustError | None = None
    claim: Claim | None = None
    claim_error: errors.CrustError | None = None
    unknown: tuple[str, ...] = ()
    reserved: Reserved | None = None

    @property
    def live(self) -> bool:
        """Whether a sandbox has the volume now."""
        return self.claim is not None and self.claim.live

    @property
    def reservation(self) -> Reserved | None:
        """The volume and the device that it blocks, by a record of any version; None if that is not known."""
        return self.record.reserved if self.record is not None else self.reserved

    @property
    def state(self) -> str:
        """For people: unreadable, published, or the state of the claim."""
        if self.record is None:
            return "unreadable"
        return self.claim.state.value if self.claim is not None and self.live else "published"

    def require(self) -> Record:
        """The record; raises the error if there is none."""
        if self.record is not None:
            return self.record
        raise self.error or UnknownHandoffFile(self.directory)


def read(paths: EntryPaths) -> Entry | None:
    """The entry, readable or not; None if it is absent."""
    data: bytes | None = None
    try:
        if layout.directory_exists(paths.directory):
            data = durable.find(paths.record, limit_bytes=records.LIMIT_BYTES)
        if data is None:
            return None  # no directory, or no record: absent by H-11
        record = Record.parse(data, path=paths.record, digest=paths.digest)
    except errors.CrustError as error:
        claim, claim_error = _claim_of(paths)
        reservation = reserved(data, paths.digest) if data is not None else None
        return Entry(
            paths.digest, paths.directory, None, error, claim, claim_error, reserved=reservation
        )
    unknown = tuple(filter(layout.is_unknown, listing.names(paths.directory)))
    claim, claim_error = _claim_of(paths)
    return Entry(paths.digest, paths.directory, record, None, claim, claim_error, unknown)


def find_record(paths: EntryPaths) -> Record | None:
    """The record without its claim; None if it is absent (H-11). Raises the error of one that cannot be read."""
    if not layout.directory_exists(paths.directory):
        return None
    data = durable.find(paths.record, limit_bytes=records.LIMIT_BYTES)
    return None if data is None else Record.parse(data, path=paths.record, digest=paths.digest)


def read_name(root: Layout, name: str) -> Entry | None:
    """The entry of a name in the root, readable or not; None if it is absent, or hidden."""
    if layout.is_hidden(name):
        return None
    if not layout.is_entry(name):
        path = f"{root.root}/{name}"
        return Entry(name, path, None, UnknownHandoffFile(path))
    return read(root.entry(name))


def scan(root: Layout) -> Iterator[Entry]:
    """Everything visible in the root, by name; nothing if there is no root."""
    visible = (read_name(root, name) for name in listing.names(root.root))
    return (entry for entry in visible if entry is not None)


def _claim_of(paths: EntryPaths) -> tuple[Claim | None, errors.CrustError | None]:
    try:
        return claims.read(paths), None
    except errors.CrustError as error:
        return None, error


@dataclass(frozen=True, slots=True)
class DirectoryReading:
    """The result of a look: the names of all entries, and the entries that it has read."""

    names: Set[str]
    entries: Mapping[str, Entry]


class DirectoryReader:
    """Reads one directory again at each look, one thread at a time."""

    def __init__(self, root: Layout) -> None:
        self._layout = root
        self._known: set[str] = set()
        self._stamps: dict[str, _Stamp] = {}
        self._live: set[str] = set()
        self._round: list[str] = []
        """The names whose turn comes, of all entries and of the live ones."""
        self._live_round: list[str] = []

    def forget(self, names: Iterable[str]) -> None:
        """Read these entries at the next look."""
        for name in names:
            self._stamps.pop(name, None)

    def look(self) -> DirectoryReading:
        """Look now. Blocks."""
        fresh_ns = time.time_ns() - FRESH_NS
        # By a descriptor, because the path to the root takes longer than the rest of a stat(2); without os.scandir,
        # whose objects slow down the garbage collector.
        present: dict[str, _Stamp] = {}
        root, flags = self._layout.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with (
            syscalls.translating(f"cannot list {root}"),
            contextlib.suppress(FileNotFoundError),
            syscalls.closing(os.open(root, flags)) as directory,
        ):
            for name in itertools.filterfalse(layout.is_hidden, os.listdir(directory)):
                with contextlib.suppress(FileNotFoundError):  # unpublished just now
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    present[name] = (status.st_ino, status.st_mtime_ns)
        stamps = self._stamps
        names = {name for name, stamp in present.items() if stamps.get(name) != stamp}
        # some entries whose claim has died may be unchanged
        live = _next_of(self._live_round, self._live, LOCKS_IN_TURN)
        names.update(name for name in live if not claims.is_held(self._layout.entry(name)))
        names.update(_next_of(self._round, present, IN_TURN))
        entries = {
            name: entry for name in names if (entry := read_name(self._layout, name)) is not None
        }
        for name in names | (self._known - present.keys()):
            self._known.discard(name)
            self._stamps.pop(name, None)
            self._live.discard(name)
        for name, entry in entries.items():
            self._known.add(name)
            if entry.live:
                self._live.add(name)
            # the reason of an error may pass without a change of the entry: no free descriptor, or no memory
            is_read = entry.error is None and entry.claim_error is None
            if is_read and name in present and present[name][1] < fresh_ns:
                self._stamps[name] = present[name]
        return DirectoryReading(frozenset(self._known), entries)


def _next_of(left: list[str], names: Collection[str], number: int) -> list[str]:
    """The next names of a round over a changing set, those that are still in it. `left` are the names after them."""
    if not left:
        left.extend(names)
    chosen_names, left[:] = left[:number], left[number:]
    return [name for name in chosen_names if name in names]
