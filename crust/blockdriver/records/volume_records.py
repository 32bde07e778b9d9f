"""The volume records, by volume id, in the store that the engine has for them.

An id in a request becomes a record's key only if it has the form of this pool's ids (`pool_ids`).
"""

from collections.abc import Callable

from crust import errors, volumes
from crust.blockdriver.engines.pool_store import RecordChanged, RecordStore
from crust.blockdriver.records.index import Index
from crust.blockdriver.records.stored_record import UNREADABLE
from crust.blockdriver.records.volume_record import UnreadableVolumeRecord, VolumeRecord


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
    """The records of a pool's volumes; each is read when it is needed.

    `index` is what sums and pages need of all of them at once, read when the pool is opened and kept since.
    """

    def __init__(self, store: RecordStore, is_id: Callable[[str], bool]) -> None:
        """`is_id`: whether a text is the id of a volume of this pool."""
        self._store = store
        self._is_id = is_id
        self.index = Index()

    def open(self) -> None:
        """Read every record once.

        A record that cannot be read is in the index without a size: its volume exists, is unhealthy, and the size of
        its image stays reserved (`PoolCapacity`).
        """
        self._store.open()
        self.index.clear()
        for key in sorted(self._store.ids()):
            if self._is_id(key):
                volume_id = volumes.VolumeId(key)
                self.index.put(volume_id, self._readable(volume_id))

    def refresh(self) -> None:
        """Put into the index what other processes have written."""
        for key in self._store.changed():
            if not self._is_id(key):
                continue
            volume_id = volumes.VolumeId(key)
            if self._store.load(key) is None:
                self.index.drop(volume_id)
            else:
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
        data = self._store.load(volume_id)
        if data is None:
            return None
        shown = self._store.shown(volume_id)
        record = VolumeRecord.parse(data, shown)
        if record.volume_id != volume_id:
            raise UnreadableVolumeRecord(shown, f"it describes {record.volume_id}")
        return record.note_stored(data)

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
        """Write `record`, durably, in place of the one that it was made of; returns it. For an existing volume it
        succeeds on a full disk too. Raises `pool_store.RecordChanged`.
        """
        volume_id, data = volumes.VolumeId(record.volume_id), record.encode()
        try:
            self._store.save(volume_id, data, previous=record.stored)
        except errors.CrustError:
            self._look_again(volume_id)
            raise
        self.index.put(volume_id, record)
        return record.note_stored(data)

    def check_stored(self, record: VolumeRecord) -> None:
        """Raise `RecordChanged` unless `record` is what is stored."""
        if self._store.load(record.volume_id) != record.stored:
            raise RecordChanged(self._store.shown(record.volume_id))

    def check_absent(self, volume_id: volumes.VolumeId) -> None:
        """Raise `RecordChanged` if there is a record by now."""
        if self._store.load(volume_id) is not None:
            raise RecordChanged(self._store.shown(volume_id))

    def _look_again(self, volume_id: volumes.VolumeId) -> None:
        """After a failed write, whose record may be there already, if only its last step failed."""
        try:
            present = self.find(volume_id)
        except errors.CrustError:
            self.index.put(volume_id, None)
            return
        if present is not None:
            self.index.put(volume_id, present)

    def remove(self, volume_id: volumes.VolumeId, *, previous: bytes | None = None) -> None:
        """Remove a record, durably; absent is a success. With `previous` only that one (`RecordChanged`)."""
        self._store.remove(volume_id, previous=previous)
        self.index.drop(volume_id)

    def age_s(self, volume_id: volumes.VolumeId) -> float:
        """The seconds since the last write of the volume's record; 0 if there is none."""
        return self._store.age_s(volume_id)

    def ids(self) -> tuple[volumes.VolumeId, ...]:
        """The ids of all records, readable or not, sorted."""
        return self.index.page("", 0)
