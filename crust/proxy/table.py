"""The table of targets: one row for each target at which something stands, or an operation is at work.

A change replaces a row; rows are immutable. The proxy is the only process that writes entries and mounts guards (it
holds the directory's lock), so the table is exact for both while the proxy runs; looks add what runtimes and people
change. A row reserves its volume from the moment its publish begins, and its device from the moment the device is
verified, until nothing stands at the target any more.

A question about a volume or a device goes through all rows: a node has hundreds, and no second fact can be wrong. One
lock guards the rows: threads reserve devices. It is never held over I/O. A method that holds it may call another one.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from crust.core import volumes
from crust.handoff import claims
from crust.handoff.entry import Entry
from crust.handoff.record import Record
from crust.proxy import target as targets
from crust.proxy.target import Stack, Target


class Table:
    """The rows, by name."""

    def __init__(self) -> None:
        self._rows: dict[str, Target] = {}
        self.clock = 0
        """The time by the proxy's own changes; `merge` gets it from the beginning of a look."""
        self._changed: dict[str, int] = {}
        """When the proxy changed a row last, since the last look began."""
        self._ended: list[Target] = []
        self._lock = threading.RLock()

    def at(self, path: str) -> Target | None:
        """The row of a target path."""
        return self._rows.get(volumes.TargetPath(path).digest)

    def at_name(self, name: str) -> Target | None:
        """The row of an entry's name."""
        return self._rows.get(name)

    def find(self, path: str) -> Record | None:
        """The record at a target path, None if no entry is there.

        Raises the error (`errors.Corrupt`) of an unreadable entry: an unknown volume is not an absent one, and the
        host must not mount it.
        """
        row = self.at(path)
        if row is None or row.entry is None:
            return None
        return row.entry.require()

    def expect(self, path: str) -> Record:
        """The record at a target path; raises `claims.NotPublished`."""
        record = self.find(path)
        if record is None:
            raise claims.NotPublished(path)
        return record

    def rows(self) -> tuple[Target, ...]:
        """Every row. Any thread may ask."""
        return tuple(self._rows.values())

    def entries(self) -> tuple[Entry, ...]:
        """Every entry by name, unreadable ones included."""
        rows = sorted(self.rows(), key=lambda row: row.name)
        return tuple(row.entry for row in rows if row.entry is not None)

    def of(self, key: volumes.VolumeKey) -> tuple[Target, ...]:
        """The deferred targets of a volume, those at which something may stand included."""
        return tuple(row for row in self.rows() if row.key == key and not row.raw)

    def concerns(self, key: volumes.VolumeKey) -> bool:
        """Whether a target without a row may be another spelling of a deferred target of the volume.

        A guard whose volume nobody knows may be anybody's.
        """
        return any(
            not row.raw and (row.key == key or (row.key is None and row.entry is None))
            for row in self.rows()
        )

    def states(self) -> Mapping[tuple[str, str], int]:
        """How many entries of which driver are in which state. Any thread may ask."""
        found = [(row.record, row.entry) for row in self.rows() if row.entry is not None]
        return Counter((record.key.driver if record else "", each.state) for record, each in found)

    def reservations(self) -> int:
        """How many entries reserve a device. Any thread may ask."""
        return sum(row.entry is not None and row.key is not None for row in self.rows())

    def check_readable(self, key: volumes.VolumeKey) -> None:
        """Raise ReservedByUnreadableEntry if an entry that cannot be read has the volume, or may have it."""
        refused = targets.unreadable_entry(key, self.rows())
        if refused is not None:
            raise refused

    def check_reservation(self, wanted: Target, *, deferred: bool = True) -> None:
        """Raise what refuses the target its volume or device, as `reserve`, and change nothing."""
        refused = targets.conflict(wanted, self.rows(), deferred=deferred)
        if refused is not None:
            raise refused

    def reserve(self, wanted: Target) -> None:
        """Put the row, unless another target has its volume or device: raises DeviceReserved,
        ReservedByUnreadableEntry. Any thread may do so.
        """
        with self._lock:
            self.check_reservation(wanted)
            self.put(wanted)

    def put(self, row: Target) -> None:
        """Replace the row of a target. Any thread may do so."""
        with self._lock:
            self.clock += 1
            self._changed[row.name] = self.clock
            self._rows[row.name] = row

    def drop(self, name: str) -> None:
        """Remove the row: nothing stands at the target."""
        with self._lock:
            self.clock += 1
            self._changed[name] = self.clock
            self._remove(name)

    def note(self, row: Target) -> None:
        """Replace the row after a look that has changed only what the proxy remembers."""
        with self._lock:
            if row.name in self._rows:
                self._rows[row.name] = row

    def merge(
        self,
        began: int,
        names: Set[str],
        read: Mapping[str, Target],
        stacks: Mapping[str, Stack] | None,
    ) -> tuple[str, ...]:
        """Store what a look has found: all `names` of entries, those that were `read`, and the mounts by path.

        `stacks` is None if no mount has changed. Rows that the proxy has changed since the look began, and those at
        which an operation is at work, are newer: returns their names, to be read again.
        """
        with self._lock:
            newer = {name for name, changed in self._changed.items() if changed > began}
            self._changed = {name: self._changed[name] for name in newer}
            newer |= {name for name, row in self._rows.items() if row.busy}
            for name in self._rows.keys() - names - newer:
                row = self._rows[name]
                if row.entry is not None:
                    self._note_ended(row)
                    self._rows[name] = replace(row, entry=None, reported=None, problems=frozenset())
            for name in read.keys() - newer:
                self._rows[name] = _observed(self._rows.get(name), read[name])
            if stacks is not None:
                self._set_stacks(stacks, newer)
            for name in self._rows.keys() - newer:
                if not _stands(self._rows[name]):
                    self._remove(name)
            return tuple(newer)

    def take_ended(self) -> Sequence[Target]:
        """The rows whose entry is gone, and of which something was reported that has ended with it."""
        ended, self._ended = self._ended, []
        return ended

    def _set_stacks(self, stacks: Mapping[str, Stack], newer: Set[str]) -> None:
        for name in self._rows.keys() - newer:
            row = self._rows[name]
            stack = stacks.get(row.path, Stack.CLEAR)
            if stack is not row.stack and not row.raw:
                self._rows[name] = replace(row, stack=stack)
        for path, stack in stacks.items():
            row = Target.of(path, stack=stack)
            if _stands(row) and row.name not in self._rows and row.name not in newer:
                self._rows[row.name] = row

    def _remove(self, name: str) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            self._note_ended(row)

    def _note_ended(self, row: Target) -> None:
        if row.reported is not None or row.problems:
            self._ended.append(row)


def _observed(known: Target | None, read: Target) -> Target:
    """The row with what a look has read of its entry. An entry that cannot be read keeps its last reservation."""
    if known is None:
        return read
    if read.is_unreadable and read.key is None:
        return replace(known, entry=read.entry)
    return replace(
        known,
        path=read.path,
        entry=read.entry,
        key=read.key,
        devices=read.devices,
        readonly=read.readonly,
        handler=read.handler,
        guard=known.guard if read.guard is None else read.guard,
    )


def _stands(row: Target) -> bool:
    return row.entry is not None or row.raw or row.stack not in (Stack.CLEAR, Stack.FOREIGN)
