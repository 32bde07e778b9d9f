"""The content records of volumes: one directory, replaced atomically, durably, and never by a stale copy.

A record has a revision. A write names the revision that it was read at, and is refused if the file has another one by
now: a caller with old knowledge, a second writer or a late process, must read and decide again. So no write can undo
"formatted" because it did not know of it.

A volume without a content record is in doubt, not "new": nothing is ever formatted because a file is missing.
"""

import threading
from collections.abc import Callable

from crust import errors, volumes
from crust.blockdriver.records import stored_record
from crust.blockdriver.records.content_record import ContentRecord, UnreadableContentRecord
from crust.blockdriver.records.reserve import Reserve
from crust.host.files import durable
from crust.host.files.held_directory import Place

_SUFFIX = ".json"
_LOCKS = 64


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
    """The records below one directory. Safe from any thread."""

    def __init__(self, directory: Place, is_id: Callable[[str], bool], reserve: Reserve) -> None:
        """`is_id`: whether a text is the id of a volume of this pool."""
        self._directory = directory
        self._is_id = is_id
        self._reserve = reserve
        self._locks = tuple(threading.Lock() for _ in range(_LOCKS))

    def open(self) -> None:
        """Create the directory, and remove the temporary files of a crash."""
        durable.make_directory(self._directory, 0o700)
        durable.remove_temporary_files(self._directory)

    def find(self, volume_id: volumes.VolumeId) -> ContentRecord | None:
        """A volume's content record, or None. Raises `UnreadableContentRecord`, `NewerContentRecord`."""
        if not self._is_id(volume_id):
            return None
        path = self._path(volume_id)
        try:
            data = durable.read(path, limit_bytes=stored_record.LIMIT_BYTES)
        except errors.NotFound:
            return None
        record = ContentRecord.parse(data, str(path))
        if record.volume_id != volume_id:
            raise UnreadableContentRecord(str(path), f"it describes {record.volume_id}")
        return record

    def load(self, volume_id: volumes.VolumeId) -> ContentRecord:
        """The content record of an existing volume; raises `ContentRecordMissing` besides what `find` raises."""
        record = self.find(volume_id)
        if record is None:
            raise ContentRecordMissing(volume_id, str(self._path(volume_id)))
        return record

    def save(self, record: ContentRecord) -> ContentRecord:
        """Write `record` durably, if the file still has the revision that was read; returns it as written.

        Raises `StaleContentRecord`. A record that was never written has revision 0, and so has an absent file.
        """
        volume_id = volumes.VolumeId(record.volume_id)
        with self._locks[hash(volume_id) % _LOCKS]:
            present = self.find(volume_id)
            found = present.revision if present else 0
            if found != record.revision:
                raise StaleContentRecord(volume_id, record.revision, found)
            written = record.but(revision=record.revision + 1)
            publish = self._reserve.publish if present else durable.publish
            publish(self._path(volume_id), written.encode())
        return written

    def remove(self, volume_id: volumes.VolumeId) -> None:
        """Remove a content record, durably; absent is a success."""
        durable.remove(self._path(volume_id))

    def _path(self, volume_id: volumes.VolumeId) -> Place:
        return self._directory / (volume_id + _SUFFIX)
