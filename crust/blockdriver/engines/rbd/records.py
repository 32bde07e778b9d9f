"""Records in the pool itself: three omap keys per record, in one object per kind.

    crust.records.<kind>     d.<id>   the record
                             v.<id>   its SHA-256, which a write compares
                             t.<id>   the time of the write, in seconds since 1970, by the writer's clock
    crust.content.<id>       the same keys without id: the content record of a volume

A write is one operation of RADOS that requires the digest of what the caller has read, so of a controller and a node
that change a record one wins, whatever their clocks say. A cluster warns of an object with more than 200,000 keys:
that is 60,000 volumes in one namespace.

Nodes write content records, and a user may have the key of one volume alone (`crust.ceph.caps`). So each of these has
an object of its own, which comes and goes with the record.

The other objects are made once, with the pool. One that is missing later was removed by hand: nothing is served then,
and no empty one takes its place, because its volumes would seem to be gone.
"""

import errno
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.engines.pool_store import PoolAbsent, RecordChanged, RecordKind
from crust.blockdriver.engines.rbd.place import Place, ignoring
from crust.ceph import binding, failures, omap
from crust.ceph.binding import Ioctx
from crust.ceph.caps import CONTENT

_DATA, _DIGEST, _TIME = "d.", "v.", "t."


def object_name(kind: RecordKind) -> str:
    """The object with the records of a kind."""
    return f"crust.records.{kind.value}"


@dataclass(frozen=True, slots=True)
class RbdRecords:
    """The records of volumes, of snapshots or of groups. Safe from any thread, and beside other processes."""

    place: Place
    kind: RecordKind

    def open(self) -> None:
        """Nothing to prepare: a write is complete or absent. Raises `PoolAbsent` if the object was removed."""
        self.load("")

    def ids(self) -> tuple[str, ...]:
        """In pages of 1,000."""
        with (
            self.place.ioctx(f"cannot list {self._name}") as ioctx,
            present(self.place, self._name),
        ):
            return tuple(key for key, _ in omap.read(ioctx, self._name, _DIGEST))

    def load(self, key: str) -> bytes | None:
        """The record's bytes."""
        with self.place.ioctx(f"cannot read {self.shown(key)}") as ioctx:
            return self._read(ioctx, _DATA + key)

    def save(self, key: str, data: bytes, *, previous: bytes | None) -> None:
        """Compare and write in one operation. Raises `RecordChanged`."""
        expected = {_DIGEST + key: "" if previous is None else _digest(previous)}
        with (
            self.place.ioctx(f"cannot write {self.shown(key)}") as ioctx,
            _compared(self.shown(key), errno.ECANCELED),
            present(self.place, self._name),
        ):
            omap.put(ioctx, self._name, _values(key, data), expected=expected)

    def remove(self, key: str, *, previous: bytes | None = None) -> None:
        """Compare and remove the three keys in one operation, also in a full pool. Raises `RecordChanged`."""
        keys = (_DATA + key, _DIGEST + key, _TIME + key)
        expected = {} if previous is None else {_DIGEST + key: _digest(previous)}
        with self.place.ioctx(f"cannot remove {self.shown(key)}") as ioctx:
            try:
                with (
                    _compared(self.shown(key), errno.ECANCELED),
                    present(self.place, self._name),
                ):
                    omap.drop(ioctx, self._name, keys, expected=expected)
            except RecordChanged:
                if self._read(ioctx, _DATA + key) is not None:
                    raise

    def age_s(self, key: str) -> float:
        """By the clock of the controller that wrote it, and ours."""
        with self.place.ioctx(f"cannot read {self.shown(key)}") as ioctx:
            return _age_s(self._read(ioctx, _TIME + key))

    def shown(self, key: str) -> str:
        """Object and key, as `rados getomapval` takes them."""
        return f"{_DATA}{key} of {self._name} in {self.place.shown}"

    @property
    def _name(self) -> str:
        return object_name(self.kind)

    def _read(self, ioctx: Ioctx, key: str) -> bytes | None:
        with present(self.place, self._name):
            return omap.read_keys(ioctx, self._name, (key,)).get(key)


@dataclass(frozen=True, slots=True)
class RbdContentRecords:
    """The content records of volumes, by volume id. Safe from any thread, and beside other processes."""

    place: Place

    def open(self) -> None:
        """Nothing to prepare."""

    def ids(self) -> tuple[str, ...]:
        """By a listing of all objects, which takes the time of the data: nothing in a driver's life needs it."""
        with self.place.ioctx(f"cannot list {self.place.shown}") as ioctx:
            names = (str(each.key) for each in ioctx.list_objects())
            return tuple(name.removeprefix(CONTENT) for name in names if name.startswith(CONTENT))

    def load(self, key: str) -> bytes | None:
        """The record's bytes."""
        return self._read(key, _DATA)

    def save(self, key: str, data: bytes, *, previous: bytes | None) -> None:
        """Compare and write in one operation, which makes the object of a new record. Raises `RecordChanged`."""
        expected = {} if previous is None else {_DIGEST: _digest(previous)}
        with (
            self.place.ioctx(f"cannot write {self.shown(key)}") as ioctx,
            _compared(self.shown(key), errno.ECANCELED, errno.EEXIST, errno.ENOENT),
        ):
            new = previous is None
            omap.put(ioctx, CONTENT + key, _values("", data), expected=expected, new=new)

    def remove(self, key: str, *, previous: bytes | None = None) -> None:
        """Compare and remove the object in one operation, also in a full pool. Raises `RecordChanged`."""
        expected = {} if previous is None else {_DIGEST: _digest(previous)}
        with (
            self.place.ioctx(f"cannot remove {self.shown(key)}") as ioctx,
            _compared(self.shown(key), errno.ECANCELED),
            ignoring(errno.ENOENT),
        ):
            omap.remove(ioctx, CONTENT + key, expected=expected)

    def age_s(self, key: str) -> float:
        """By the clock of the process that wrote it, and ours."""
        return _age_s(self._read(key, _TIME))

    def shown(self, key: str) -> str:
        """Object and key, as `rados getomapval` takes them."""
        return f"{_DATA} of {CONTENT}{key} in {self.place.shown}"

    def _read(self, volume_id: str, key: str) -> bytes | None:
        with (
            self.place.ioctx(f"cannot read {self.shown(volume_id)}") as ioctx,
            ignoring(errno.ENOENT),
        ):
            return omap.read_keys(ioctx, CONTENT + volume_id, (key,)).get(key)
        return None


def store(place: Place, kind: RecordKind) -> RbdRecords | RbdContentRecords:
    """The store of the records of a kind."""
    return RbdContentRecords(place) if kind is RecordKind.CONTENT else RbdRecords(place, kind)


def _values(key: str, data: bytes) -> dict[str, bytes]:
    written = str(int(time.time())).encode()
    return {_DATA + key: data, _DIGEST + key: _digest(data).encode(), _TIME + key: written}


def _age_s(written: bytes | None) -> float:
    return max(time.time() - float(written), 0.0) if written else 0.0


@contextmanager
def _compared(shown: str, *numbers: int) -> Iterator[None]:
    """Raise `RecordChanged` for what an operation reports whose comparison has failed."""
    try:
        yield
    except binding.load().failures as err:
        if failures.errno_of(err) not in numbers:
            raise
        raise RecordChanged(shown) from err


@contextmanager
def present(place: Place, name: str) -> Iterator[None]:
    """Raise `PoolAbsent` if the object, one of the pool's, is not there."""
    try:
        yield
    except binding.load().failures as err:
        if failures.errno_of(err) != errno.ENOENT:
            raise
        raise PoolAbsent(
            f"the records of {place.shown} are gone",
            why=f"the object {name} does not exist, and the driver does not remove it",
            hint="find out who removed it; the images are untouched, and the driver goes on when it is back",
        ) from err


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
