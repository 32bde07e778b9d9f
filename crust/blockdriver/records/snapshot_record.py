"""Records of snapshots and groups on disk: one JSON object each, of a declared schema.

`phase` is the intent, as with volumes: "creating" is on disk before a byte is copied, "deleting" before one is
removed. An interrupted snapshot is taken again by the same request: its image, complete or not, was never answered,
and may be of a filesystem that a restart thawed in the middle.

A snapshot is independent of its volume: it keeps the state of the content, so that it can be restored after the
volume was changed or deleted.
"""

import threading
from collections.abc import Callable
from typing import Annotated, Generic, Literal, TypeVar

import pydantic

from crust import errors
from crust.blockdriver.engines.pool_store import RecordChanged, RecordStore
from crust.blockdriver.records import stored_record
from crust.blockdriver.records.content_record import ContentState
from crust.blockdriver.records.stored_record import Remembered
from crust.blockdriver.records.volume_record import Phase

SCHEMA: Literal[1] = 1


class UnreadableSnapshotRecord(errors.Corrupt):
    """The record of a snapshot or group cannot be read."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the record {path} cannot be read",
            why=why,
            hint="restore it from a backup, or run the version that wrote it; nothing was changed",
        )
        self.path = path


class SnapshotRecord(Remembered):
    """A snapshot. Sizes are bytes, times nanoseconds since 1970."""

    version: Annotated[Literal[1], pydantic.Field(alias="schema")] = SCHEMA
    snapshot_id: str
    name: str
    phase: Phase
    source_volume_id: str
    size_bytes: Annotated[int, pydantic.Field(gt=0)]
    created_ns: int
    state: ContentState
    """The state of the volume's content: see `content_record`."""
    fs_type: str
    planned_uuid: str = ""
    filled_bytes: int
    in_guest: bool = False
    group_id: str = ""
    """The group snapshot that it is a member of."""
    attempt: str = ""
    """Which attempt wrote it, drawn at random: two of one name are never equal. Empty in older ones."""

    @property
    def id(self) -> str:
        """The id, which names the record."""
        return self.snapshot_id


class GroupRecord(Remembered):
    """A group snapshot; `members` are (volume id, snapshot id), by volume id."""

    version: Annotated[Literal[1], pydantic.Field(alias="schema")] = SCHEMA
    group_id: str
    name: str
    phase: Phase
    created_ns: int
    members: tuple[tuple[str, str], ...]
    attempt: str = ""
    """As of a snapshot."""

    @property
    def id(self) -> str:
        """The id, which names the record."""
        return self.group_id


M = TypeVar("M", SnapshotRecord, GroupRecord)


class SnapshotRecords(Generic[M]):
    """The records of one kind, each read once. Safe from any thread."""

    def __init__(self, store: RecordStore, model: type[M], is_id: Callable[[str], bool]) -> None:
        self._store = store
        self._model: type[M] = model
        self.is_id = is_id
        self._guard = threading.Lock()
        self._records: dict[str, M] = {}
        self._unreadable: dict[str, str] = {}

    def open(self) -> None:
        """Read every record.

        One that cannot be read does not affect the others: only a request for it gets the error.
        """
        self._store.open()
        with self._guard:
            self._records.clear()
            self._unreadable.clear()
        for key in self._store.ids():
            if self.is_id(key):
                self._read(key)

    def count(self) -> int:
        """How many there are, those included that cannot be read."""
        with self._guard:
            return len(self._records.keys() | self._unreadable.keys())

    def refresh(self) -> None:
        """Read what other processes have written."""
        for key in self._store.changed():
            if self.is_id(key):
                self._read_again(key)

    def _read_again(self, key: str) -> None:
        with self._guard:
            self._unreadable.pop(key, None)
            self._records.pop(key, None)
        self._read(key)

    def find(self, record_id: str) -> M | None:
        """The record in whatever phase, or None. Raises `UnreadableSnapshotRecord`.

        One that is not known here may be of another controller, and is looked for; `refresh` finds the changed ones.
        """
        if self.is_id(record_id) and not self.has(record_id):
            self._read(record_id)
        with self._guard:
            if record_id in self._unreadable:
                shown = self._store.shown(record_id)
                raise UnreadableSnapshotRecord(shown, self._unreadable[record_id])
            return self._records.get(record_id)

    def save(self, record: M) -> M:
        """Write `record`, durably, in place of the one that it was made of; returns it. For an existing one it
        succeeds on a full disk too. Raises `pool_store.RecordChanged`.
        """
        data = record.model_dump_json(by_alias=True).encode() + b"\n"
        try:
            self._store.save(record.id, data, previous=record.stored)
        except errors.CrustError:
            self._read(record.id)  # it may be there already, if only its last step failed
            raise
        record.note_stored(data)
        with self._guard:
            self._records[record.id] = record
        return record

    def check_stored(self, record: M) -> None:
        """Raise `pool_store.RecordChanged` unless `record` is what is stored."""
        if self._store.load(record.id) != record.stored:
            self._read_again(record.id)
            raise RecordChanged(self._store.shown(record.id))

    def remove(self, record: M) -> None:
        """Remove `record`, durably; absent is a success. One whose removal may not be durable is kept, to be written
        and removed again. Raises `pool_store.RecordChanged` if it is not the stored one.
        """
        record_id = record.id
        try:
            self._store.remove(record_id, previous=record.stored)
        except RecordChanged:
            self._read_again(record_id)
            raise
        except errors.CrustError:
            with self._guard:
                kept = self._records.get(record_id)
            if kept is not None and self._store.load(record_id) is None:
                kept.note_stored(None)
            raise
        with self._guard:
            self._records.pop(record_id, None)

    def age_s(self, record_id: str) -> float:
        """The seconds since the last write of a record; 0 if there is none. Blocks."""
        return self._store.age_s(record_id)

    def ready(self) -> list[M]:
        """Every record in phase "ready", ordered by id."""
        with self._guard:
            ready = [each for each in self._records.values() if each.phase == "ready"]
        return sorted(ready, key=lambda each: each.id)

    def is_ready(self, record_id: str) -> bool:
        """Whether it is in phase "ready" now."""
        with self._guard:
            record = self._records.get(record_id)
            return record is not None and record.phase == "ready"

    def has(self, record_id: str) -> bool:
        """Whether there is a record, in whatever phase, readable or not."""
        with self._guard:
            return record_id in self._records or record_id in self._unreadable

    def unreadable(self) -> tuple[str, ...]:
        """The records that cannot be read, with the reasons; they are kept."""
        with self._guard:
            found = sorted(self._unreadable.items())
        return tuple(
            str(UnreadableSnapshotRecord(self._store.shown(each), why)) for each, why in found
        )

    def unfinished(self) -> list[M]:
        """Every other record."""
        with self._guard:
            return [each for each in self._records.values() if each.phase != "ready"]

    def _read(self, record_id: str) -> None:
        data: bytes | None = b""
        try:
            data = self._store.load(record_id)
            if data is None:
                return
            record = self._model.model_validate_json(data)
        except pydantic.ValidationError as err:
            self._unreadable[record_id] = _why_unreadable(data or b"", err)
            return
        except errors.CrustError as err:
            self._unreadable[record_id] = str(err)
            return
        if record.id != record_id:
            self._unreadable[record_id] = f"it describes {record.id}"
            return
        with self._guard:
            self._records[record_id] = record.note_stored(data)


def _why_unreadable(data: bytes, err: pydantic.ValidationError) -> str:
    found = stored_record.schema_of(data)
    if found is not None and found > SCHEMA:
        return f"it has schema {found}, and this version of the driver knows schemas up to {SCHEMA}"
    first = err.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
