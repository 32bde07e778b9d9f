"""The content records of volumes, in the store that the engine has for them, and never replaced by a stale copy.

A record has a revision. A write names the revision that it was read at, and is refused if there is another one by
now: a caller with old knowledge, a second writer or a late process, must read and decide again. So no write can undo
"formatted" because it did not know of it.

A volume without a content record is in doubt, not "new": nothing is ever formatted because a file is missing.
"""

from collections.abc import Callable

from crust import errors, volumes
from crust.blockdriver.engines.pool_store import RecordChanged, RecordStore
from crust.blockdriver.records.content_record import ContentRecord, UnreadableContentRecord


class StaleContentRecord(errors.OperationPending):
    """A content record has changed since it was read."""

    def __init__(self, volume_id: str, read: int, found: int) -> None:
        super().__init__(
            f"the content record of {volume_id} is not written",
            why=f"it was read at revision {read}, and has revision {found} now",
            hint="retry: the call then reads the present record",
        )
        self.volume_id = volume_id
        self.read = read
        self.found = found


class ContentRecordMissing(errors.Corrupt):
    """A volume has no content record."""

    def __init__(self, volume_id: str, path: str) -> None:
        super().__init__(
            f"the content of {volume_id} is unknown",
            why=f"its content record {path} does not exist, and the driver did not remove it",
            hint="restore the file from a backup; nothing is formatted, copied or mounted on doubt",
        )
        self.volume_id = volume_id
        self.path = path


class ContentRecords:
    """The records of what a pool's volumes hold. Safe from any thread."""

    def __init__(self, store: RecordStore, is_id: Callable[[str], bool]) -> None:
        """`is_id`: whether a text is the id of a volume of this pool."""
        self._store = store
        self._is_id = is_id

    def open(self) -> None:
        """Prepare the store."""
        self._store.open()

    def find(self, volume_id: volumes.VolumeId) -> ContentRecord | None:
        """A volume's content record, or None. Raises `UnreadableContentRecord`, `NewerContentRecord`."""
        return self._read(volume_id)[0]

    def _read(self, volume_id: volumes.VolumeId) -> tuple[ContentRecord | None, bytes | None]:
        data = self._store.load(volume_id) if self._is_id(volume_id) else None
        if data is None:
            return None, None
        shown = self._store.shown(volume_id)
        record = ContentRecord.parse(data, shown)
        if record.volume_id != volume_id:
            raise UnreadableContentRecord(shown, f"it describes {record.volume_id}")
        return record, data

    def load(self, volume_id: volumes.VolumeId) -> ContentRecord:
        """The content record of an existing volume; raises `ContentRecordMissing` besides what `find` raises."""
        record = self.find(volume_id)
        if record is None:
            raise ContentRecordMissing(volume_id, self._store.shown(volume_id))
        return record

    def save(self, record: ContentRecord) -> ContentRecord:
        """Write `record` durably, if the stored one still has the revision that was read; returns it as written.

        Raises `StaleContentRecord`. A record that was never written has revision 0, and so has an absent one.
        """
        volume_id = volumes.VolumeId(record.volume_id)
        present, stored = self._read(volume_id)
        found = present.revision if present else 0
        if found != record.revision:
            raise StaleContentRecord(volume_id, record.revision, found)
        written = record.but(revision=record.revision + 1)
        try:
            self._store.save(volume_id, written.encode(), previous=stored)
        except RecordChanged as err:
            raise StaleContentRecord(volume_id, record.revision, found + 1) from err
        return written

    def remove(self, volume_id: volumes.VolumeId) -> None:
        """Remove a content record, durably; absent is a success."""
        self._store.remove(volume_id)
