"""The records of one kind, by id, in the store that the engine has for them: read when they are needed, never cached.

There is one comparison: a write names the bytes that the writer has read, and the store refuses it if it has other
bytes by now (`RecordChanged`). A caller with old knowledge, a second writer or a late process, must read and decide
again; so no write can undo a "formatted" that it did not know.

An id in a request becomes a record's key only if it has the form of this pool's ids (`pool_access`). The driver
remembers no error: a store that does not answer says nothing about a record. It keeps a small summary of each volume
and snapshot set in memory: a page of a list, the sum of reserved bytes and a node's volumes cost the same for 20
records and 2,000.
"""

import bisect
import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from crust.blockdriver.engines.pool_access import RecordStore
from crust.blockdriver.records.models import StoredRecord, Summary
from crust.core import errors, volumes

UNREADABLE = (errors.Corrupt, errors.Refused, errors.RuntimeFailed)
"""Errors of one record or image only: damaged, owned by another user, a bad sector."""

M = TypeVar("M", bound=StoredRecord)


class Index:
    """The ids of all records of a kind, in order, and a summary of each. Safe from any thread.

    The id of a snapshot set is typed as that of a volume. A record has no summary if it could not be read, or if a
    write has failed and may exist all the same.
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self.clear()

    def clear(self) -> None:
        with self._guard:
            self._ids: list[volumes.VolumeId] = []
            self._summaries: dict[str, Summary | None] = {}
            self._reserved_bytes = {False: 0, True: 0}
            """Of thin and of thick volumes."""
            self._on_node: defaultdict[str, set[volumes.VolumeId]] = defaultdict(set)
            self._snapshots_of: Counter[str] = Counter()

    def note(self, record_id: str, summary: Summary | None, *, in_doubt: bool = False) -> None:
        """Note a record with that summary, its absence, or a record that is `in_doubt`."""
        volume_id = volumes.VolumeId(record_id)
        with self._guard:
            is_known, earlier = record_id in self._summaries, self._summaries.pop(record_id, None)
            if earlier is not None:
                self._reserved_bytes[earlier.thick] -= earlier.capacity_bytes
                for node_id in earlier.nodes:
                    self._on_node[node_id].discard(volume_id)
                self._snapshots_of.subtract(source for _, source in earlier.snapshots)
            if summary is not None:
                self._reserved_bytes[summary.thick] += summary.capacity_bytes
                for node_id in summary.nodes:
                    self._on_node[node_id].add(volume_id)
                self._snapshots_of.update(source for _, source in summary.snapshots)
            is_there = summary is not None or in_doubt
            if is_there:
                self._summaries[record_id] = summary
            if is_there and not is_known:
                bisect.insort(self._ids, volume_id)
            if is_known and not is_there:
                del self._ids[bisect.bisect_left(self._ids, volume_id)]

    def learn(self, record_id: str, record: StoredRecord | None) -> None:
        """Note the result of a read of a record that had no summary; a newer write stays."""
        with self._guard:
            if record_id in self._summaries and self._summaries[record_id] is None:
                self.note(record_id, record.summary if record else None)

    def page(self, after: str = "") -> tuple[volumes.VolumeId, ...]:
        """The ids greater than `after`, in order."""
        with self._guard:
            return tuple(self._ids[bisect.bisect_right(self._ids, volumes.VolumeId(after)) :])

    def has(self, record_id: str) -> bool:
        """Whether there is a record, readable or not."""
        with self._guard:
            return record_id in self._summaries

    def get(self, record_id: str) -> Summary | None:
        with self._guard:
            return self._summaries.get(record_id)

    def unreadable(self) -> tuple[volumes.VolumeId, ...]:
        """The records without a summary."""
        with self._guard:
            return tuple(record_id for record_id in self._ids if self._summaries[record_id] is None)

    def reserved_bytes(
        self, pending: Mapping[str, int] | None = None, *, thick: bool = False
    ) -> int:
        """The sum of the sizes that are known of thin volumes, or of the thick ones; one in `pending`, which has that
        kind, counts with the larger of its two sizes.
        """
        with self._guard:
            reserved_bytes = self._reserved_bytes[thick]
            for volume_id, size_bytes in (pending or {}).items():
                summary = self._summaries.get(volume_id)
                reserved_bytes += max(size_bytes - (summary.capacity_bytes if summary else 0), 0)
            return reserved_bytes

    def snapshots_of(self, volume_id: str) -> int:
        """How many snapshots a volume has, those in groups included; unreadable sets do not count."""
        with self._guard:
            return self._snapshots_of[volume_id]

    def on_node(self, node_id: str) -> frozenset[volumes.VolumeId]:
        with self._guard:
            return frozenset(self._on_node.get(node_id, ()))


@dataclass(eq=False)
class Records(Generic[M]):
    """The records of a kind, by id. Safe from any thread; every method may block."""

    _store: RecordStore
    _model: type[M]
    is_id: Callable[[str], bool]
    """Whether a text is the id of such a record in this pool."""
    index: Index | None = field(default=None, init=False)
    """Learns each read."""

    def find(self, key: str) -> M | None:
        """The record, or None. Raises RecordUnreadable, and the errors of the store."""
        if not self.is_id(key):
            return None
        data = self._store.load(key)
        record = None if data is None else self._model.parse(data, key, self._store.shown)
        if self.index is not None:
            self.index.learn(key, record)
        return record

    def load(self, key: str) -> M:
        """The record; raises the kind's `missing`, and the errors of `find`."""
        record = self.find(key)
        if record is None:
            raise self._model.missing(key, self._store.shown(key))
        return record

    def save(self, record: M) -> M:
        """Replace, durably and on a full disk too, the bytes that `record` was read from; returns the new one. Raises
        `RecordChanged`.
        """
        assert record.stored is not None
        written = record.model_copy(update={"revision": record.revision + 1})
        data = written.encode()
        self._store.save(record.key, data, previous=record.stored)
        return written.model_copy(update={"stored": data})


@dataclass(eq=False)
class IndexedRecords(Records[M]):
    """Records by which volumes and sets exist, with an index of all: the index's methods do not block."""

    index: Index = field(default_factory=Index, init=False)

    def open(self) -> None:
        """Read every record once. An unreadable record does not affect the others."""
        self.index.clear()
        for key in sorted(self._store.ids()):
            if self.is_id(key):
                self.index.note(key, None, in_doubt=True)
                with contextlib.suppress(*UNREADABLE):
                    self.find(key)

    def unreadable(self) -> list[errors.CrustError]:
        """The errors of records that cannot be read; the records stay."""
        unreadable: list[errors.CrustError] = []
        for key in self.index.unreadable():
            try:
                self.find(key)
            except UNREADABLE as err:
                unreadable.append(err)
        return unreadable

    def check_known(self, key: str) -> None:
        """Raise the kind's `missing` unless there is a record. Does not block."""
        if not self.index.has(key):
            raise self._model.missing(key, self._store.shown(key))

    def make(self, record: M, commit: Callable[[bytes], None]) -> M:
        """Store the first bytes of a record with its volume or set, by `commit`; returns the stored record."""
        data = record.encode()
        with self.changing(record.key, record.summary):
            commit(data)
        return record.model_copy(update={"stored": data})

    def save(self, record: M) -> M:
        with self.changing(record.key, record.summary):
            return super().save(record)

    @contextmanager
    def changing(self, key: str, summary: Summary | None) -> Iterator[None]:
        """Note the result of the block: a record with that summary, or none. One that failed may have made it."""
        try:
            yield
        except errors.CrustError:
            self.look_again(key)
            raise
        self.index.note(key, summary)

    def look_again(self, key: str) -> None:
        """Note the present record; it is in doubt if it cannot be read now."""
        self.index.note(key, None, in_doubt=True)
        with contextlib.suppress(errors.CrustError):
            self.find(key)
