"""Records in files, and what an engine does to them: writes a record with what it describes, and removes both."""

from pathlib import Path
from typing import TypeVar

from crust.blockdriver.engines.files.directories import FileRecords, Reserve
from crust.blockdriver.records.models import StoredRecord
from crust.blockdriver.records.records import IndexedRecords, Records

M = TypeVar("M", bound=StoredRecord)


def file_records(directory: Path) -> FileRecords:
    """A store of records in a directory of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = Reserve(Path(f"{directory}.reserve"))
    return FileRecords(directory, "record.json", kept, 16 * 1024 * 1024)


def place_of(records: Records[M], record_id: str) -> Path:
    """The file of a record."""
    return Path(records._store.shown(record_id))


def made(records: Records[M], record: M) -> M:
    """Write a record as an engine does, which makes it with what it describes."""
    path = place_of(records, record.key)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(record.encode())
    path.chmod(0o600)
    if isinstance(records, IndexedRecords):
        records.index.note(record.key, record.summary)
    return record.model_copy(update={"stored": record.encode()})


def removed(records: Records[M], record_id: str) -> None:
    """Remove a record as an engine does."""
    place_of(records, record_id).unlink()
    if isinstance(records, IndexedRecords):
        records.index.note(record_id, None)
