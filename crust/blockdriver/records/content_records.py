"""What the volumes hold: a directory of content records, replaced atomically, durably, and never by a stale copy.

A record carries a revision. A write names the one that it was read at, and is refused when the file has another by
now: whoever decided on old knowledge, a second writer or a process that was late, reads again and decides again. So
no write can undo "formatted" because it did not know of it.

A volume without a content record is in doubt. It is not "new": nothing is ever formatted because a file is missing.
"""

import os
import threading
from collections.abc import Callable

from crust import errors, volumes
from crust.blockdriver.records import stored_record
from crust.blockdriver.records.content_record import ContentRecord, UnreadableContentRecord
from crust.blockdriver.records.reserve import Reserve
from crust.host.files import durable

_SUFFIX = ".json"
_LOCKS = 64


class StaleContentRecord(errors.OperationPending):
    """A content record is to be written that somebody else wrote meanwhile."""

    def __init__(self, volume_id: str, read: int, found: int) -> None:
        super().__init__(
            f"the content record of {volume_id} is not written",
            why=f"it was read at revision {read}, and is at revision {found} by now",
            hint="retry: the call then sees what was written meanwhile",
        )
        self.volume_id = volume_id
        self.read = read
        self.found = found


class ContentRecordMissing(errors.Corrupt):
    """There is a volume, and no record of what it holds."""

    def __init__(self, volume_id: str, path: str) -> None:
        super().__init__(
            f"it is not known what {volume_id} holds",
            why=f"its content record {path} is gone, and the driver did not remove it",
            hint="restore the file from a backup; nothing is formatted, copied or mounted on doubt",
        )
        self.volume_id = volume_id
        self.path = path


class ContentRecords:
    """The records below one directory. Safe from any thread."""

    def __init__(self, directory: str, is_id: Callable[[str], bool], reserve: Reserve) -> None:
        """`is_id` says whether a text is the id of a volume of this pool."""
        self._directory = directory
        self._is_id = is_id
        self._reserve = reserve
        self._locks = tuple(threading.Lock() for _ in range(_LOCKS))

    def open(self) -> None:
        """Make the directory, and remove what a crash left of unfinished writes."""
        durable.make_directory(self._directory, 0o700)
        durable.sweep(self._directory)

    def find(self, volume_id: volumes.VolumeId) -> ContentRecord | None:
        """What is known of a volume's bytes, or None. Raises `UnreadableContentRecord`, `NewerContentRecord`."""
        if not self._is_id(volume_id):
            return None
        path = self._path(volume_id)
        try:
            data = durable.read(path, limit_bytes=stored_record.LIMIT_BYTES)
        except errors.NotFound:
            return None
        record = ContentRecord.parse(data, path)
        if record.volume_id != volume_id:
            raise UnreadableContentRecord(path, f"it describes {record.volume_id}")
        return record

    def load(self, volume_id: volumes.VolumeId) -> ContentRecord:
        """What is known of an existing volume's bytes; raises `ContentRecordMissing` besides what `find` raises."""
        record = self.find(volume_id)
        if record is None:
            raise ContentRecordMissing(volume_id, self._path(volume_id))
        return record

    def save(self, record: ContentRecord) -> ContentRecord:
        """Make `record` the truth, durably, if it was read at the revision that the file has; answers it as written.

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
        """Forget what a volume held, durably; absent is fine."""
        durable.remove(self._path(volume_id))

    def _path(self, volume_id: volumes.VolumeId) -> str:
        return os.path.join(self._directory, volume_id + _SUFFIX)
