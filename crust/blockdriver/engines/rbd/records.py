"""Records in the pool itself: two omap keys per record, in one object per kind.

    crust.records.<kind>     d.<id>   the record
                             v.<id>   its SHA-256, which a write compares
    crust.content.<id>       the same keys without id: the content record of a volume
                             f.       the SHA-256 of the first one, as it was when the volume was made

A write is one operation of RADOS that requires the digest of what the caller has read, so of a controller and a node
that change a record one wins, whatever their clocks say. A cluster warns of an object with more than 200,000 keys:
that is 100,000 volumes in one namespace.

Nodes write content records, and a user may have the key of one volume alone (`crust.ceph.caps`). So each of these has
an object of its own, which comes and goes with the record.

The other objects are made once, with the pool. One that is missing later was removed by hand: nothing is served then,
and no empty one takes its place, because its volumes would seem to be gone.
"""

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.engines.pool_store import PoolAbsent, RecordChanged, RecordKind
from crust.blockdriver.engines.rbd.place import Place
from crust.ceph import binding, failures, omap
from crust.ceph.caps import CONTENT
from crust.ceph.failures import ignoring

DATA, DIGEST, _FIRST = "d.", "v.", "f."


def object_name(kind: RecordKind) -> str:
    """The object with the records of a kind."""
    return f"crust.records.{kind.value}"


@dataclass(frozen=True, slots=True)
class RbdRecords:
    """The records of volumes or of snapshot sets, which are made and removed by `intents`.

    Safe from any thread, and beside other processes. Raises `PoolAbsent` if the object was removed.
    """

    place: Place
    kind: RecordKind

    def ids(self) -> tuple[str, ...]:
        """In pages of 1,000."""
        with (
            self.place.ioctx(f"cannot list {self._name}") as ioctx,
            present(self.place, self._name),
        ):
            return tuple(key for key, _ in omap.read(ioctx, self._name, DIGEST))

    def load(self, key: str) -> bytes | None:
        """The record's bytes."""
        with (
            self.place.ioctx(f"cannot read {self.shown(key)}") as ioctx,
            present(self.place, self._name),
        ):
            return omap.read_keys(ioctx, self._name, (DATA + key,)).get(DATA + key)

    def save(self, key: str, data: bytes, *, previous: bytes) -> None:
        """Compare and write in one operation. Raises `RecordChanged`."""
        with (
            self.place.ioctx(f"cannot write {self.shown(key)}") as ioctx,
            compared(self.shown(key), errno.ECANCELED),
            present(self.place, self._name),
        ):
            expected = {DIGEST + key: digest(previous)}
            omap.put(ioctx, self._name, values(key, data), expected=expected)

    def shown(self, key: str) -> str:
        """Object and key, as `rados getomapval` takes them."""
        return f"{DATA}{key} of {self._name} in {self.place.shown}"

    @property
    def _name(self) -> str:
        return object_name(self.kind)


@dataclass(frozen=True, slots=True)
class RbdContentRecords:
    """The content records of volumes, by volume id. Safe from any thread, and beside other processes."""

    place: Place

    def ids(self) -> tuple[str, ...]:
        """By a listing of all objects, which takes the time of the data: nothing in a driver's life needs it."""
        with self.place.ioctx(f"cannot list {self.place.shown}") as ioctx:
            names = (str(each.key) for each in ioctx.list_objects())
            return tuple(name.removeprefix(CONTENT) for name in names if name.startswith(CONTENT))

    def load(self, key: str) -> bytes | None:
        """The record's bytes."""
        with (
            self.place.ioctx(f"cannot read {self.shown(key)}") as ioctx,
            ignoring(errno.ENOENT),
        ):
            return omap.read_keys(ioctx, CONTENT + key, (DATA,)).get(DATA)
        return None

    def save(self, key: str, data: bytes, *, previous: bytes) -> None:
        """Compare and write in one operation. Raises `RecordChanged`."""
        with (
            self.place.ioctx(f"cannot write {self.shown(key)}") as ioctx,
            compared(self.shown(key), errno.ECANCELED, errno.ENOENT),
        ):
            omap.put(ioctx, CONTENT + key, values("", data), expected={DIGEST: digest(previous)})

    def remove(self, key: str) -> None:
        """Remove the object, also in a full pool; absent is a success."""
        with self.place.ioctx(f"cannot remove {self.shown(key)}") as ioctx, ignoring(errno.ENOENT):
            omap.remove(ioctx, CONTENT + key)

    def make(self, key: str, data: bytes) -> None:
        """Write the first record of a volume that is being made; a record that is there belongs to no volume."""
        written = {**values("", data), _FIRST: digest(data).encode()}
        with self.place.ioctx(f"cannot write {self.shown(key)}") as ioctx:
            omap.put(ioctx, CONTENT + key, written)

    def is_first(self, key: str) -> bool:
        """Whether nobody has written it since the volume was made; so it is without a record, too."""
        with (
            self.place.ioctx(f"cannot read {self.shown(key)}") as ioctx,
            ignoring(errno.ENOENT),
        ):
            found = omap.read_keys(ioctx, CONTENT + key, (DIGEST, _FIRST))
            return found.get(DIGEST) == found.get(_FIRST)
        return True

    def shown(self, key: str) -> str:
        """Object and key, as `rados getomapval` takes them."""
        return f"{DATA} of {CONTENT}{key} in {self.place.shown}"


def store(place: Place, kind: RecordKind) -> RbdRecords | RbdContentRecords:
    """The store of the records of a kind."""
    return RbdContentRecords(place) if kind is RecordKind.CONTENT else RbdRecords(place, kind)


def values(key: str, data: bytes) -> dict[str, bytes]:
    """The keys of a record."""
    return {DATA + key: data, DIGEST + key: digest(data).encode()}


@contextmanager
def compared(shown: str, *numbers: int) -> Iterator[None]:
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


def digest(data: bytes) -> str:
    """What is compared of a record: only ASCII can be."""
    return hashlib.sha256(data).hexdigest()
