"""The table of targets, the entries with their rows, and the events: all parts of the proxy share them.

The table has one row for each target at which something stands, or an operation is at work. A change replaces a row;
rows are immutable. The proxy is the only process that writes entries and mounts guards (it holds the directory's
lock), so the table is exact for both while the proxy runs; looks add changes by runtimes and people. A row reserves
its volume from the moment its publish begins, and its device from the moment the device is verified, until nothing
stands at the target any more. Code that changes the directory reads the directory first, not the table.

A question about a volume or a device goes through all rows: a node has hundreds, and no second fact can be wrong. One
lock guards the rows: threads reserve devices. It is never held over I/O. A method that holds it may call another one.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from crust.core import credentials, errors, volumes
from crust.core.operations import KeyedOperations
from crust.core.printable import printable
from crust.core.supervised import Health
from crust.handoff import claims
from crust.handoff.claims import Claim
from crust.handoff.entry import Entry
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.proxy.filesystems import Filesystems
from crust.proxy.guard import Devices, Targets, set_of
from crust.proxy.target import MountStack, TargetRow, TargetState, conflict, unreadable_entry

_LOOK_S = 10.0
"""For a look at one entry, which takes microseconds."""

QUEUE_LENGTH = 256
"""Events that wait for a watcher."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event. `kind` is a value of crust.v1.Event.kind; `time_s` is Unix time."""

    kind: str
    target_path: str = ""
    handler: str = ""
    message: str = ""
    time_s: float = field(default_factory=time.time)


class Events:
    """Distributes events to watchers, and never waits for one.

    Each watcher has a bounded queue. If the queue is full, events for that watcher are dropped and counted, and the
    watcher gets the count. A message may be another program's text: watchers see it escaped, without what looks like
    a credential. Nothing depends on events: the handoff directory is the truth.
    """

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Queue[Event | None], int] = {}
        self._ended = False

    def emit(self, event: Event) -> None:
        """Put `event` into the queue of every watcher, unless the queue is full."""
        for queue in self._watchers:
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._watchers[queue] += 1

    def end(self) -> None:
        """End every watch, also watches that begin from now on."""
        self._ended = True
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[Event]]:
        queue: asyncio.Queue[Event | None] = asyncio.Queue(QUEUE_LENGTH)
        self._watchers[queue] = 0
        try:
            yield self._events(queue)
        finally:
            del self._watchers[queue]

    async def _events(self, queue: asyncio.Queue[Event | None]) -> AsyncIterator[Event]:
        while not self._ended and (event := await queue.get()) is not None:
            yield replace(event, message=printable(credentials.shown(event.message)))
            if queue.empty() and self._watchers[queue]:
                dropped, self._watchers[queue] = self._watchers[queue], 0
                yield Event(
                    "missed", message=f"{dropped} events were dropped: the reader is too slow"
                )


class Table:
    def __init__(self) -> None:
        self._rows: dict[str, TargetRow] = {}
        self.clock = 0
        """The time by the proxy's own changes; `merge` gets it from the beginning of a look."""
        self._changed: dict[str, int] = {}
        """When the proxy changed a row last, since the last look began."""
        self._ended: list[TargetRow] = []
        self._lock = threading.RLock()

    def at(self, path: str) -> TargetRow | None:
        return self._rows.get(volumes.TargetPath(path).digest)

    def at_name(self, name: str) -> TargetRow | None:
        return self._rows.get(name)

    def find(self, path: str) -> Record | None:
        """The record at a target path; None without an entry.

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

    def rows(self) -> tuple[TargetRow, ...]:
        """Every row. Any thread may ask."""
        return tuple(self._rows.values())

    def entries(self) -> tuple[Entry, ...]:
        """Every entry by name, unreadable ones included."""
        rows = sorted(self.rows(), key=lambda row: row.name)
        return tuple(row.entry for row in rows if row.entry is not None)

    def of(self, key: volumes.VolumeKey) -> tuple[TargetRow, ...]:
        """The deferred targets of a volume, those at which something may stand included."""
        return tuple(row for row in self.rows() if row.key == key)

    def concerns(self, key: volumes.VolumeKey) -> bool:
        """Whether a target without a row may be another spelling of a deferred target of the volume.

        A guard whose volume is unknown may be the volume's.
        """
        return any(row.key == key or (row.key is None and row.entry is None) for row in self.rows())

    def states(self) -> Mapping[tuple[str, str], int]:
        """How many entries of which driver are in which state. Any thread may ask."""
        rows = [(row.record, row.entry) for row in self.rows() if row.entry is not None]
        return Counter((record.key.driver if record else "", entry.state) for record, entry in rows)

    def reservations(self) -> int:
        """How many targets reserve a device. Any thread may ask."""
        return sum(row.devices is not None for row in self.rows())

    def check_readable(self, key: volumes.VolumeKey) -> None:
        """Raise ReservedByUnreadableEntry if an entry that cannot be read has the volume, or may have it."""
        refusal = unreadable_entry(key, self.rows())
        if refusal is not None:
            raise refusal

    def check_reservation(self, row: TargetRow, *, deferred: bool = True) -> None:
        """Raise as `reserve`, and change nothing."""
        refusal = conflict(row, self.rows(), deferred=deferred)
        if refusal is not None:
            raise refusal

    def reserve(self, row: TargetRow) -> None:
        """Put the row, unless another target has its volume or device: raises DeviceReserved,
        ReservedByUnreadableEntry. Any thread may do so.
        """
        with self._lock:
            self.check_reservation(row)
            self.put(row)

    def put(self, row: TargetRow) -> None:
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

    def note(self, row: TargetRow) -> None:
        """Replace the row after a look that has changed only facts that the proxy remembers."""
        with self._lock:
            if row.name in self._rows:
                self._rows[row.name] = row

    def merge(
        self,
        began: int,
        names: Set[str],
        read: Mapping[str, TargetRow],
        stacks: Mapping[str, MountStack] | None,
    ) -> tuple[str, ...]:
        """Store the result of a look: all `names` of entries, the rows of the `read` entries, the mounts by path.

        `stacks` is None if no mount has changed. Rows that the proxy has changed since the look began, and busy rows,
        are newer: returns their names, to be read again.
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
                self._rows[name] = observed(self._rows.get(name), read[name])
            if stacks is not None:
                self._set_stacks(stacks, newer)
            for name in self._rows.keys() - newer:
                if not _is_occupied(self._rows[name]):
                    self._remove(name)
            return tuple(newer)

    def take_ended(self) -> Sequence[TargetRow]:
        """The rows whose entry is gone, and whose reported claim or problems have ended with it."""
        ended, self._ended = self._ended, []
        return ended

    def _set_stacks(self, stacks: Mapping[str, MountStack], newer: Set[str]) -> None:
        for name in self._rows.keys() - newer:
            row = self._rows[name]
            stack = stacks.get(row.path, MountStack.CLEAR)
            if stack is not row.stack:
                self._rows[name] = replace(row, stack=stack)
        for path, stack in stacks.items():
            row = TargetRow.of(path, stack=stack)
            if _is_occupied(row) and row.name not in self._rows and row.name not in newer:
                self._rows[row.name] = row

    def _remove(self, name: str) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            self._note_ended(row)

    def _note_ended(self, row: TargetRow) -> None:
        if row.reported is not None or row.problems:
            self._ended.append(row)


def observed(row: TargetRow | None, read: TargetRow) -> TargetRow:
    """The row with the entry that a look has read. An unreadable entry keeps its last reservation."""
    if row is None:
        return read
    if read.is_unreadable and read.devices is None:
        return replace(row, entry=read.entry)
    return replace(
        row,
        path=read.path,
        entry=read.entry,
        key=read.key,
        devices=read.devices,
        readonly=read.readonly,
        handler=read.handler,
        guard=row.guard if read.guard is None else read.guard,
    )


def _is_occupied(row: TargetRow) -> bool:
    return row.entry is not None or row.stack not in (MountStack.CLEAR, MountStack.FOREIGN)


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of this node, their rows, the host's targets and devices, the operations, and the events."""

    store: Store
    table: Table
    targets: Targets
    filesystems: Filesystems
    devices: Devices
    operations: KeyedOperations
    """By volume and by target: an operation that changes something holds the keys of both."""
    events: Events
    health: Health

    def report_problem(self, name: str, part: str, problem: errors.CrustError | None) -> None:
        """Set the problem of a part of a target; None: it is well. Health, row and events have it."""
        row = self.table.at_name(name)
        if row is None or (problem is None and part not in row.problems):
            return
        is_known = part in row.problems
        problems = row.problems - {part} if problem is None else row.problems | {part}
        self.table.note(replace(row, problems=problems))
        self.health.report(f"{part} of {row.path}", problem, is_fatal=False)
        if problem is None:
            self.events.emit(Event("healthy", row.path, message=part))
        elif not is_known:
            self.events.emit(Event("unhealthy", row.path, message=str(problem)))

    def observe(self, key: volumes.VolumeKey, target: volumes.TargetPath) -> TargetState:
        """Observe a target: its entry with the claim, and its mounts. An error is a part of the observation.

        While a program runs on the volume, the state is unknown.
        """
        try:
            self.filesystems.locks.check_free(str(key))
            entry, mounts = self.store.read(target), self.targets.look(target)
        except Exception as error:  # also MemoryError: an unseen mount is not an absent mount
            return TargetState(stack=MountStack.UNSEEN, problem=error)
        return TargetState(entry, mounts.stack, mounts.mount)

    def row_of(self, entry: Entry) -> TargetRow:
        """The row of an entry as it was read, without the facts that only the proxy remembers."""
        reservation = entry.reservation
        if reservation is None:
            return TargetRow(entry.digest, entry=entry)
        return TargetRow(
            entry.digest,
            reservation.target.text,
            entry,
            key=reservation.key,
            devices=set_of(self.devices, reservation.device) if reservation.device else None,
            readonly=reservation.readonly,
            handler=entry.record.handler if entry.record else None,
        )

    async def holder(self, record: Record) -> Claim | None:
        """The claim of the sandbox that has the volume; without a name while the sandbox has not written claim.json.

        Raises the reason if claim.json of a held claim cannot be read: a newer runtime may have written it. An entry
        that hangs costs one thread, not one for each call.
        """
        return await self.operations.look(
            ("holder", record.target),
            lambda: self._holder(record.target),
            timeout_s=_LOOK_S,
            shown=f"the entry of {record.target}",
            fresh=True,
        )

    def _holder(self, target: volumes.TargetPath) -> Claim | None:
        entry = self.store.read(target)
        if entry is None:
            return None
        if entry.claim_error is not None and claims.is_held(self.store.layout.entry(target)):
            raise entry.claim_error
        return entry.claim if entry.live else None
