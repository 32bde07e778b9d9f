"""The volume records: one directory, named by volume id, replaced atomically and durably.

An id in a request becomes a file name only if it has the form of this pool's ids (`pool`).
"""

import os
import time
from collections.abc import Callable, Iterator

from crust import errors, volumes
from crust.blockdriver.records import stored_record
from crust.blockdriver.records.index import Index
from crust.blockdriver.records.reserve import Reserve
from crust.blockdriver.records.stored_record import UNREADABLE
from crust.blockdriver.records.volume_record import UnreadableVolumeRecord, VolumeRecord
from crust.host.files import durable
from crust.host.files.held_directory import Place
from crust.host.process import oserrors

_SUFFIX = ".json"


class VolumeNotFound(errors.NotFound):
    """No volume of this id exists."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(f"there is no volume {volume_id!r}")
        self.volume_id = volume_id


class AboveLimit(errors.OutOfRange):
    """The volume is larger than the request allows."""

    def __init__(self, volume_id: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{volume_id} has {size_bytes} bytes",
            why=f"limit_bytes is {limit_bytes}, and a volume never shrinks",
            hint="raise the limit",
        )
        self.volume_id = volume_id


class VolumeRecords:
    """The records below one directory. One process writes them; each is read when it is needed.

    `index` is what sums and pages need of all of them at once, read when the directory is opened and kept since.
    """

    def __init__(self, directory: Place, is_id: Callable[[str], bool], reserve: Reserve) -> None:
        """`is_id`: whether a text is the id of a volume of this pool."""
        self._directory = directory
        self._is_id = is_id
        self._reserve = reserve
        self.index = Index()

    def open(self) -> None:
        """Create the directory, remove the temporary files of a crash, and read every record once.

        A record that cannot be read is in the index without a size: its volume exists, is unhealthy, and the size of
        its image stays reserved (`PoolCapacity`).
        """
        durable.make_directory(self._directory, 0o700)
        durable.remove_temporary_files(self._directory)
        self._reserve.keep()
        self.index.clear()
        for volume_id in self._on_disk():
            self.index.put(volume_id, self._readable(volume_id))

    def _readable(self, volume_id: volumes.VolumeId) -> VolumeRecord | None:
        try:
            return self.find(volume_id)
        except UNREADABLE:
            return None

    def find(self, volume_id: volumes.VolumeId) -> VolumeRecord | None:
        """The volume's record in whatever phase, or None. Raises `UnreadableVolumeRecord`, `NewerVolumeRecord`."""
        if not self._is_id(volume_id):
            return None
        path = self._path(volume_id)
        try:
            data = durable.read(path, limit_bytes=stored_record.LIMIT_BYTES)
        except errors.NotFound:
            return None
        record = VolumeRecord.parse(data, str(path))
        if record.volume_id != volume_id:
            raise UnreadableVolumeRecord(str(path), f"it describes {record.volume_id}")
        return record

    def check_known(self, volume_id: volumes.VolumeId) -> None:
        """Raise `VolumeNotFound` unless there is a record of the volume, in whatever phase. Does not block."""
        if not self.index.has(volume_id):
            raise VolumeNotFound(volume_id)

    def load(self, volume_id: volumes.VolumeId) -> VolumeRecord:
        """The record of a volume that is ready; raises `VolumeNotFound` besides what `find` raises."""
        record = self.find(volume_id)
        if record is None or record.phase != "ready":
            raise VolumeNotFound(volume_id)
        return record

    def save(self, record: VolumeRecord) -> VolumeRecord:
        """Write `record`, durably; returns it. For an existing volume it succeeds on a full disk too."""
        volume_id = volumes.VolumeId(record.volume_id)
        publish = self._reserve.publish if self.index.has(volume_id) else durable.publish
        try:
            publish(self._path(volume_id), record.encode())
        except errors.CrustError:
            # It may have its name already, and only the sync of the directory failed.
            if os.path.lexists(self._path(volume_id)):
                self.index.put(volume_id, self._readable(volume_id))
            raise
        self.index.put(volume_id, record)
        return record

    def remove(self, volume_id: volumes.VolumeId) -> None:
        """Remove a record, durably; absent is a success."""
        durable.remove(self._path(volume_id))
        self._reserve.keep()
        self.index.drop(volume_id)

    def age_s(self, volume_id: volumes.VolumeId) -> float:
        """The seconds since the last write of the volume's record; 0 if there is none."""
        path = self._path(volume_id)
        with oserrors.translating(f"cannot stat {path}"):
            try:
                return max(time.time() - os.stat(path).st_mtime, 0.0)
            except FileNotFoundError:
                return 0.0

    def ids(self) -> tuple[volumes.VolumeId, ...]:
        """The ids of all records, readable or not, sorted."""
        return self.index.page("", 0)

    def _on_disk(self) -> Iterator[volumes.VolumeId]:
        with oserrors.translating(f"cannot list {self._directory}"):
            names = sorted(os.listdir(self._directory))
        for name in names:
            volume_id = name.removesuffix(_SUFFIX)
            if name.endswith(_SUFFIX) and self._is_id(volume_id):
                yield volumes.VolumeId(volume_id)

    def _path(self, volume_id: volumes.VolumeId) -> Place:
        return self._directory / (volume_id + _SUFFIX)
