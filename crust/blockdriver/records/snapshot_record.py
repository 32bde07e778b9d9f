"""Records of snapshots and groups on disk: one JSON object each, of a declared schema.

`phase` is the intent, as with volumes: "creating" is on disk before a byte is copied, "deleting" before one is
removed. An interrupted snapshot is taken again by the same request: its image, complete or not, was never answered,
and may be of a filesystem that a restart thawed in the middle.

A snapshot is independent of its volume: it keeps the state of the content, so that it can be restored after the
volume was changed or deleted.
"""

import os
import threading
from collections.abc import Callable
from typing import Annotated, Generic, Literal, TypeVar

import pydantic

from crust import errors
from crust.blockdriver.records import stored_record
from crust.blockdriver.records.content_record import ContentState
from crust.blockdriver.records.reserve import Reserve
from crust.blockdriver.records.volume_record import Phase
from crust.host.files import durable
from crust.host.files.held_directory import Place
from crust.host.process import oserrors

SCHEMA: Literal[1] = 1
_LIMIT_BYTES = 16 * 1024 * 1024
"""More than a group with as many volumes as fit into one gRPC message needs."""
_SUFFIX = ".json"


class UnreadableSnapshotRecord(errors.Corrupt):
    """The record of a snapshot or group cannot be read."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the record {path} cannot be read",
            why=why,
            hint="restore it from a backup, or run the version that wrote it; nothing was changed",
        )
        self.path = path


class SnapshotRecord(pydantic.BaseModel):
    """A snapshot. Sizes are bytes, times nanoseconds since 1970."""

    model_config = stored_record.PART

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

    @property
    def id(self) -> str:
        """The id, which names the file."""
        return self.snapshot_id


class GroupRecord(pydantic.BaseModel):
    """A group snapshot; `members` are (volume id, snapshot id), by volume id."""

    model_config = stored_record.PART

    version: Annotated[Literal[1], pydantic.Field(alias="schema")] = SCHEMA
    group_id: str
    name: str
    phase: Phase
    created_ns: int
    members: tuple[tuple[str, str], ...]

    @property
    def id(self) -> str:
        """The id, which names the file."""
        return self.group_id


M = TypeVar("M", SnapshotRecord, GroupRecord)


class SnapshotRecords(Generic[M]):
    """The records below one directory, each read once and replaced atomically and durably. Safe from any thread."""

    def __init__(
        self, directory: Place, model: type[M], is_id: Callable[[str], bool], reserve: Reserve
    ) -> None:
        self._directory = directory
        self._reserve = reserve
        self._model: type[M] = model
        self.is_id = is_id
        self._guard = threading.Lock()
        self._records: dict[str, M] = {}
        self._unreadable: dict[str, str] = {}

    def open(self) -> None:
        """Create the directory, remove the temporary files of a crash, read every record.

        One that cannot be read does not affect the others: only a request for it gets the error.
        """
        durable.make_directory(self._directory, 0o700)
        durable.remove_temporary_files(self._directory)
        with self._guard:
            self._records.clear()
            self._unreadable.clear()
        with oserrors.translating(f"cannot list {self._directory}"):
            names = os.listdir(self._directory)
        for name in names:
            if name.endswith(_SUFFIX) and self.is_id(name.removesuffix(_SUFFIX)):
                self._read(name.removesuffix(_SUFFIX))

    def find(self, record_id: str) -> M | None:
        """The record in whatever phase, or None. Raises `UnreadableSnapshotRecord`."""
        with self._guard:
            if record_id in self._unreadable:
                raise UnreadableSnapshotRecord(
                    str(self._path(record_id)), self._unreadable[record_id]
                )
            return self._records.get(record_id)

    def save(self, record: M) -> M:
        """Write `record`, durably; returns it. For an existing one it succeeds on a full disk too."""
        data = record.model_dump_json(by_alias=True).encode() + b"\n"
        publish = self._reserve.publish if self.has(record.id) else durable.publish
        try:
            publish(self._path(record.id), data)
        except errors.CrustError:
            # It may have its name already, and only the sync of the directory failed.
            if os.path.lexists(self._path(record.id)):
                self._read(record.id)
            raise
        with self._guard:
            self._records[record.id] = record
        return record

    def remove(self, record_id: str) -> None:
        """Remove a record, durably; absent is a success."""
        durable.remove(self._path(record_id))
        self._reserve.keep()
        with self._guard:
            self._records.pop(record_id, None)

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
            str(UnreadableSnapshotRecord(str(self._path(each)), why)) for each, why in found
        )

    def unfinished(self) -> list[M]:
        """Every other record."""
        with self._guard:
            return [each for each in self._records.values() if each.phase != "ready"]

    def _read(self, record_id: str) -> None:
        data = b""
        try:
            data = durable.read(self._path(record_id), limit_bytes=_LIMIT_BYTES)
            record = self._model.model_validate_json(data)
        except pydantic.ValidationError as err:
            self._unreadable[record_id] = _why_unreadable(data, err)
            return
        except errors.CrustError as err:
            self._unreadable[record_id] = str(err)
            return
        if record.id != record_id:
            self._unreadable[record_id] = f"it describes {record.id}"
            return
        with self._guard:
            self._records[record_id] = record

    def _path(self, record_id: str) -> Place:
        return self._directory / (record_id + _SUFFIX)


def _why_unreadable(data: bytes, err: pydantic.ValidationError) -> str:
    found = stored_record.schema_of(data)
    if found is not None and found > SCHEMA:
        return f"it has schema {found}, and this version of the driver knows schemas up to {SCHEMA}"
    first = err.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
