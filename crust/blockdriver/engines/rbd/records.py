"""Records in the pool itself, and the intents of unfinished volumes and snapshot sets, which have no record.

    crust.records.<kind>     d.<id>   the record
                             v.<id>   its SHA-256, which a write compares
                             i.<id>   the intent: half made ("make"), or half removed ("remove"), and a note
    crust.content.<id>       d. and v. without id: the content record of a volume
                             f.       the SHA-256 of the first record, from the creation of the volume

Each change is one operation of RADOS (`omap.swap`) that requires the digest that the caller has read, so if a
controller and a node change a record, one wins, without a clock. It changes a record and its intent together. So a
volume or set exists, or it has an intent, or nothing is known of it; an image without both was made by another
program, or its record was lost. The note of an intent is the record of a half removed volume, the source of a cloned
volume, and the snapshots of a set.

A cluster warns of an object with more than 200,000 keys: that is 100,000 volumes in one namespace. Nodes write
content records, and a user may have the key of one volume alone (`pool.capabilities`). So each content record has an
object of its own, which comes and goes with it. The other objects are made once, with the pool. If one is missing
later, a person has removed it: then the driver serves nothing, and makes no empty object in its place, because its
volumes would seem to be gone.
"""

import errno
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.ceph import omap
from crust.blockdriver.ceph.binding import Ioctx, errno_of, ignoring, load
from crust.blockdriver.engines.pool_access import PoolAbsent, RecordChanged, RecordKind
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.core import volumes

CONTENT = "crust.content."
_DATA, _DIGEST, _FIRST, _INTENT = "d.", "v.", "f.", "i."
_MAKE, _REMOVE = b"make", b"remove"


def object_name(kind: RecordKind) -> str:
    return f"crust.records.{kind.value}"


@dataclass(frozen=True, slots=True)
class State:
    """The state of a volume or set: its `record`; or the note of its intent, if it is half made or half removed."""

    record: bytes | None = None
    making: bytes | None = None
    removing: bytes | None = None


@dataclass(frozen=True, slots=True)
class RbdRecords:
    """The records of volumes or of snapshot sets, and their intents.

    Safe from any thread, and beside other processes. Every method raises `PoolAbsent` if the object was removed, each
    change but `end` raises `RecordChanged` if the state is another one.
    """

    place: Namespace
    kind: RecordKind

    def ids(self) -> tuple[str, ...]:
        """In pages of 1,000."""
        with self._opened("the records") as ioctx:
            return tuple(key for key, _ in omap.read(ioctx, object_name(self.kind), _DIGEST))

    def unfinished(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes or sets that have an intent."""
        with self._opened("the intents") as ioctx:
            values = omap.read(ioctx, object_name(self.kind), _INTENT)
            return tuple(volumes.VolumeId(key) for key, _ in values)

    def load(self, key: str) -> bytes | None:
        return self.state(key).record

    def state(self, key: str) -> State:
        data, intent = _DATA + key, _INTENT + key
        with self._opened(key) as ioctx:
            values = omap.read_keys(ioctx, object_name(self.kind), (data, intent))
        verb, _, note = values.get(intent, b"").partition(b" ")
        making, removing = (note if verb == intended else None for intended in (_MAKE, _REMOVE))
        return State(values.get(data), making, removing)

    def save(self, key: str, data: bytes, *, previous: bytes) -> None:
        self._swap(key, {_DIGEST + key: _digest(previous)}, _values(key, data))

    def begin(self, key: str, note: bytes = b"") -> None:
        """Note that a new volume or set is made, before its image or snapshots."""
        self._swap(key, {_DIGEST + key: ""}, {_INTENT + key: _intent(_MAKE, note)})

    def note(self, key: str, note: bytes) -> None:
        """Add the note to the intent of a volume that is being made."""
        before = {_INTENT + key: _intent(_MAKE, b"").decode()}
        self._swap(key, before, {_INTENT + key: _intent(_MAKE, note)})

    def commit(self, key: str, record: bytes, note: bytes = b"") -> None:
        """Put the record in place of the intent of a half made volume or set, with this `note`."""
        before = {_DIGEST + key: "", _INTENT + key: _intent(_MAKE, note).decode()}
        self._swap(key, before, {**_values(key, record), _INTENT + key: None})

    def begin_removal(self, key: str, record: bytes, note: bytes) -> None:
        """Put an intent in place of the record, before the image or a snapshot is removed."""
        after = {_INTENT + key: _intent(_REMOVE, note), _DATA + key: None, _DIGEST + key: None}
        self._swap(key, {_DIGEST + key: _digest(record)}, after)

    def put_back(self, key: str, record: bytes) -> None:
        """Put the record back in place of the intent: the image of the half removed volume is in use."""
        self._swap(key, {_DIGEST + key: ""}, {**_values(key, record), _INTENT + key: None})

    def end(self, key: str) -> None:
        """Remove the intent of a volume or set without remains."""
        self._swap(key, {}, {_INTENT + key: None})

    def shown(self, key: str) -> str:
        """Object and key, for `rados getomapval`."""
        return f"{_DATA}{key} of {object_name(self.kind)} in {self.place.shown}"

    def _swap(self, key: str, before: Mapping[str, str], after: Mapping[str, bytes | None]) -> None:
        with self._opened(key) as ioctx:
            if not omap.swap(ioctx, object_name(self.kind), before, after):
                raise RecordChanged(self.shown(key))

    @contextmanager
    def _opened(self, key: str) -> Iterator[Ioctx]:
        name = object_name(self.kind)
        error_text = f"cannot read or change {key} in {name} of {self.place.shown}"
        with self.place.ioctx(error_text) as ioctx, present(self.place, name):
            yield ioctx


@dataclass(frozen=True, slots=True)
class RbdContentRecords:
    """The content records of volumes, by volume id. Safe from any thread, and beside other processes."""

    place: Namespace

    def ids(self) -> tuple[str, ...]:
        """By a listing of all objects, which takes the time of the data; no call of a driver needs it."""
        with self.place.ioctx(f"cannot list {self.place.shown}") as ioctx:
            names = (str(listed.key) for listed in ioctx.list_objects())
            return tuple(name.removeprefix(CONTENT) for name in names if name.startswith(CONTENT))

    def load(self, key: str) -> bytes | None:
        return self._read(key).get(_DATA)

    def is_first(self, key: str) -> bool:
        """Whether the record is unchanged since the volume was made; true without a record, too."""
        values = self._read(key)
        return values.get(_DIGEST) == values.get(_FIRST)

    def save(self, key: str, data: bytes, *, previous: bytes) -> None:
        """Replace the record `previous`. Raises `RecordChanged`."""
        self._write(key, {_DIGEST: _digest(previous)}, _values("", data))

    def make(self, key: str, data: bytes) -> None:
        """Write the first record of a volume that is being made; an existing record belongs to no volume."""
        self._write(key, {}, {**_values("", data), _FIRST: _digest(data).encode()})

    def remove(self, key: str) -> None:
        """Remove the object; absent is a success."""
        error_text = f"cannot remove {self.shown(key)}"
        with self.place.ioctx(error_text) as ioctx, ignoring(errno.ENOENT):
            omap.swap(ioctx, CONTENT + key, {}, None)

    def shown(self, key: str) -> str:
        return f"{_DATA} of {CONTENT}{key} in {self.place.shown}"

    def _read(self, key: str) -> dict[str, bytes]:
        error_text = f"cannot read {self.shown(key)}"
        with self.place.ioctx(error_text) as ioctx, ignoring(errno.ENOENT):
            return omap.read_keys(ioctx, CONTENT + key, (_DATA, _DIGEST, _FIRST))
        return {}

    def _write(self, key: str, before: Mapping[str, str], after: Mapping[str, bytes]) -> None:
        error_text = f"cannot write {self.shown(key)}"
        with self.place.ioctx(error_text) as ioctx, ignoring(errno.ENOENT):
            if omap.swap(ioctx, CONTENT + key, before, after):
                return
        raise RecordChanged(self.shown(key))


def store(place: Namespace, kind: RecordKind) -> RbdRecords | RbdContentRecords:
    return RbdContentRecords(place) if kind is RecordKind.CONTENT else RbdRecords(place, kind)


@contextmanager
def present(place: Namespace, name: str) -> Iterator[None]:
    """Raise `PoolAbsent` if the object of the pool is absent."""
    try:
        yield
    except load().failures as err:
        if errno_of(err) != errno.ENOENT:
            raise
        raise PoolAbsent(
            f"the records of {place.shown} are gone",
            why=f"the object {name} does not exist, and the driver does not remove it",
            hint="find out who removed it; the images are untouched, and the driver serves again when it is back",
        ) from err


def _values(key: str, data: bytes) -> dict[str, bytes]:
    return {_DATA + key: data, _DIGEST + key: _digest(data).encode()}


def _digest(data: bytes) -> str:
    """The digest by which RADOS compares a record: it can only compare ASCII."""
    return hashlib.sha256(data).hexdigest()


def _intent(verb: bytes, note: bytes) -> bytes:
    return verb + b" " + note if note else verb
