"""The records of one kind, by id, in the store that the engine has for them: read when they are needed, never cached.

There is one comparison: a write names the bytes that the record was made of, and is refused if something else is
stored by now (`RecordChanged`). A caller with old knowledge, a second writer or a late process, must read and decide
again; so no write can undo "formatted" because it did not know of it.

An id in a request becomes a record's key only if it has the form of this pool's ids (`pool_ids`). No error is
remembered: a store that does not answer says nothing about a record. Kept in memory is a small summary of each
volume and snapshot set: a page of a list, the sum of reserved bytes and a node's volumes cost the same for 20 records
and 2,000.
"""

import bisect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from crust.blockdriver.engines.pool_store import RecordStore
from crust.blockdriver.records.models import RecordUnreadable, StoredRecord, Summary
from crust.core import errors, volumes

UNREADABLE = (errors.Corrupt, errors.Refused, errors.RuntimeFailed)
"""Errors of one record or image only: damaged, owned by another user, a bad sector."""

M = TypeVar("M", bound=StoredRecord)


class Index:
    """The ids of all records of a kind, in order, and a summary of each. Safe from any thread.

    The id of a snapshot set is typed as that of a volume.

    A record has no summary if it could not be read, or if a write has failed and may be there all the same.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._ids: list[volumes.VolumeId] = []
        self._summaries: dict[str, Summary | None] = {}
        self._reserved_bytes = 0
        self._on_node: defaultdict[str, set[volumes.VolumeId]] = defaultdict(set)

    def clear(self) -> None:
        """Remove all entries."""
        with self._guard:
            self._ids.clear()
            self._summaries.clear()
            self._on_node.clear()
            self._reserved_bytes = 0

    def put(self, record_id: str, summary: Summary | None) -> None:
        """Set a record's summary; None for one that cannot be read."""
        with self._guard:
            self._put(record_id, summary)

    def drop(self, record_id: str) -> None:
        """Remove a record; absent is a success."""
        with self._guard:
            self._drop(record_id)

    def learn(self, record_id: str, record: StoredRecord | None) -> None:
        """What a read has found, of a record that had no summary: a newer write of another one is kept."""
        with self._guard:
            if self._summaries.get(record_id, _OTHER) is None:
                if record is None:
                    self._drop(record_id)
                else:
                    self._put(record_id, record.summary)

    def page(self, after: str = "") -> tuple[volumes.VolumeId, ...]:
        """The ids greater than `after`, in order."""
        with self._guard:
            return tuple(self._ids[bisect.bisect_right(self._ids, volumes.VolumeId(after)) :])

    def __len__(self) -> int:
        with self._guard:
            return len(self._ids)

    def has(self, record_id: str) -> bool:
        """Whether there is a record, readable or not."""
        with self._guard:
            return record_id in self._summaries

    def get(self, record_id: str) -> Summary | None:
        """The summary of a readable record."""
        with self._guard:
            return self._summaries.get(record_id)

    def unreadable(self) -> tuple[volumes.VolumeId, ...]:
        """The records without a summary."""
        with self._guard:
            return tuple(each for each in self._ids if self._summaries[each] is None)

    def reserved_bytes(self, pending: Mapping[volumes.VolumeId, int] | None = None) -> int:
        """The sum of all sizes that are known; a volume in `pending` counts with the larger of its two sizes."""
        with self._guard:
            reserved_bytes = self._reserved_bytes
            for volume_id, size_bytes in (pending or {}).items():
                known = self._summaries.get(volume_id)
                reserved_bytes += max(size_bytes - (known.capacity_bytes if known else 0), 0)
            return reserved_bytes

    def on_node(self, node_id: str) -> frozenset[volumes.VolumeId]:
        """The volumes that are published to a node."""
        with self._guard:
            return frozenset(self._on_node.get(node_id, ()))

    def _put(self, record_id: str, summary: Summary | None) -> None:
        if record_id in self._summaries:
            self._subtract(record_id)
        else:
            bisect.insort(self._ids, volumes.VolumeId(record_id))
        self._summaries[record_id] = summary
        if summary is not None:
            self._reserved_bytes += summary.capacity_bytes
            for node_id in summary.nodes:
                self._on_node[node_id].add(volumes.VolumeId(record_id))

    def _drop(self, record_id: str) -> None:
        if record_id in self._summaries:
            self._subtract(record_id)
            del self._summaries[record_id]
            del self._ids[bisect.bisect_left(self._ids, volumes.VolumeId(record_id))]

    def _subtract(self, record_id: str) -> None:
        summary = self._summaries[record_id]
        if summary is not None:
            self._reserved_bytes -= summary.capacity_bytes
            for node_id in summary.nodes:
                self._on_node[node_id].discard(volumes.VolumeId(record_id))


_OTHER = Summary()


class Records(Generic[M]):
    """The records of the kind `model`, by id. Safe from any thread; every method may block."""

    def __init__(self, store: RecordStore, model: type[M], is_id: Callable[[str], bool]) -> None:
        """`is_id`: whether a text is the id of such a record in this pool."""
        self._store = store
        self._model = model
        self.is_id = is_id

    def find(self, key: str) -> M | None:
        """The record, or None. Raises `RecordUnreadable`, and what the store raises."""
        return self._read(key) if self.is_id(key) else None

    def _read(self, key: str) -> M | None:
        data = self._store.load(key)
        if data is None:
            return None
        record = self._model.parse(data, lambda: self._store.shown(key))
        if record.id != key:
            raise RecordUnreadable(self._store.shown(key), f"it describes {record.id}")
        return record

    def load(self, key: str) -> M:
        """The record of what exists; raises the kind's `missing` besides what `find` raises."""
        record = self.find(key)
        if record is None:
            raise self._model.missing(key, self._store.shown(key))
        return record

    def save(self, record: M) -> M:
        """Write `record`, durably, in place of the one that it was made of, on a full disk too; returns what was
        written. Raises `RecordChanged`.
        """
        assert record.stored is not None
        written = record.as_written()
        data = written.encode()
        self._store.save(record.id, data, previous=record.stored)
        return written.note_stored(data)


class IndexedRecords(Records[M]):
    """Records of what exists by them, with an index of all: its methods do not block."""

    def __init__(self, store: RecordStore, model: type[M], is_id: Callable[[str], bool]) -> None:
        super().__init__(store, model, is_id)
        self.index = Index()

    def open(self) -> None:
        """Read every record once. One that cannot be read does not affect the others."""
        self.index.clear()
        for key in sorted(self._store.ids()):
            if self.is_id(key):
                self.index.put(key, self._readable(key))

    def _readable(self, key: str) -> Summary | None:
        try:
            record = self._read(key)
        except UNREADABLE:
            return None
        return record.summary if record else None

    def find(self, key: str) -> M | None:
        """As `Records.find`; the index learns of it."""
        record = super().find(key)
        self.index.learn(key, record)
        return record

    def ids(self) -> tuple[volumes.VolumeId, ...]:
        """The ids of all records, readable or not, sorted."""
        return self.index.page()

    def unreadable(self) -> list[errors.CrustError]:
        """Why records cannot be read; they are kept."""
        found: list[errors.CrustError] = []
        for key in self.index.unreadable():
            try:
                self.find(key)
            except UNREADABLE as err:
                found.append(err)
        return found

    def check_known(self, key: str) -> None:
        """Raise the kind's `missing` unless there is a record. Does not block."""
        if not self.index.has(key):
            raise self._model.missing(key, self._store.shown(key))

    def save(self, record: M) -> M:
        """As `Records.save`."""
        with self.changing(record.id, record.summary):
            return super().save(record)

    @contextmanager
    def changing(self, key: str, after: Summary | None) -> Iterator[None]:
        """Note what the block makes of a record: one with that summary, or none.

        A block that fails may have made it, if only its last step failed: then the record is read.
        """
        try:
            yield
        except errors.CrustError:
            self.look_again(key)
            raise
        self._note(key, after)

    def look_again(self, key: str) -> None:
        """Note what there is of a record by now."""
        try:
            record = self._read(key)
        except errors.CrustError:
            self.index.put(key, None)
            return
        self._note(key, record.summary if record else None)

    def _note(self, key: str, summary: Summary | None) -> None:
        if summary is None:
            self.index.drop(key)
        else:
            self.index.put(key, summary)
