"""The unfinished volumes and snapshot sets of a pool, half made or half removed: each has one key, its intent.

    crust.records.volumes      i.<volume id>    "make", or "remove" and the volume record
    crust.records.snapshots    i.<set id>       "make" or "remove", and the snapshots of the set

A record and its intent are changed by one operation of RADOS. So a volume or set exists, or it has an intent, or
nothing is known of it; an image without both was made by somebody else, or its record was lost.

    begin            the intent "make", before an image or snapshot
    commit           the record in place of the intent "make"
    begin_removal    the intent "remove" in place of the record, before the image or a snapshot goes
    put_back         the record in place of the intent "remove": somebody has the image
    end              no intent: nothing is left
"""

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.records import (
    DATA,
    DIGEST,
    compared,
    digest,
    object_name,
    present,
    values,
)
from crust.ceph import omap
from crust.ceph.binding import Ioctx
from crust.core import errors, volumes

U = TypeVar("U", bound="Undoable")
_INTENT = "i."
_MAKE, _REMOVE = b"make", b"remove"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class State:
    """What there is of a volume or set: its `record`; or it is half made or half removed, with what was noted."""

    record: bytes | None = None
    making: bytes | None = None
    removing: bytes | None = None


class Undoable(Protocol):
    """A volume or set that is being made."""

    @property
    def is_committed(self) -> bool:
        """Whether it exists by now."""
        ...


@contextmanager
def undone(key: str, making: U, settle: Callable[[], None]) -> Iterator[U]:
    """Settle what the block does not commit. A settlement that fails is left to a later one, and hides no error."""
    try:
        yield making
    except Exception:
        try:
            settle()
        except errors.CrustError as err:
            _log.warning("a half made volume or set stays for now", extra={"id": key, "error": err})
        raise
    if not making.is_committed:
        settle()


@dataclass(frozen=True, slots=True)
class Intents:
    """The intents beside records of one kind. Each change raises `RecordChanged` if another state is there."""

    place: Place
    kind: RecordKind

    def ids(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes or sets that have an intent."""
        with self._opened("the intents") as ioctx:
            found = omap.read(ioctx, object_name(self.kind), _INTENT)
            return tuple(volumes.VolumeId(key) for key, _ in found)

    def state(self, key: str) -> State:
        """What there is now."""
        data, intent = DATA + key, _INTENT + key
        with self._opened(key) as ioctx:
            found = omap.read_keys(ioctx, object_name(self.kind), (data, intent))
        verb, _, note = found.get(intent, b"").partition(b" ")
        making, removing = (note if verb == each else None for each in (_MAKE, _REMOVE))
        return State(found.get(data), making, removing)

    def begin(self, key: str, note: bytes = b"") -> None:
        """Note that a volume or set is made, which does not exist."""
        self._put(key, {_INTENT + key: _value(_MAKE, note)}, expected={DIGEST + key: ""})

    def commit(self, key: str, record: bytes, note: bytes = b"") -> None:
        """Have the record of a half made volume or set, with this `note`."""
        expected = {DIGEST + key: "", _INTENT + key: _value(_MAKE, note).decode()}
        self._put(key, values(key, record), dropped=(_INTENT + key,), expected=expected)

    def begin_removal(self, key: str, record: bytes, note: bytes) -> None:
        """Note that a volume or set is removed, in place of its record."""
        intent, keys = {_INTENT + key: _value(_REMOVE, note)}, tuple(values(key, record))
        self._put(key, intent, dropped=keys, expected={DIGEST + key: digest(record)})

    def put_back(self, key: str, record: bytes) -> None:
        """Have the record of a half removed volume or set again."""
        keys = (_INTENT + key,)
        self._put(key, values(key, record), dropped=keys, expected={DIGEST + key: ""})

    def _put(
        self,
        key: str,
        put: Mapping[str, bytes],
        *,
        dropped: tuple[str, ...] = (),
        expected: Mapping[str, str],
    ) -> None:
        with self._opened(key) as ioctx:
            omap.put(ioctx, object_name(self.kind), put, dropped=dropped, expected=expected)

    def end(self, key: str) -> None:
        """Forget the intent of a volume or set of which nothing is left."""
        with self._opened(key) as ioctx:
            omap.drop(ioctx, object_name(self.kind), (_INTENT + key,))

    @contextmanager
    def _opened(self, key: str) -> Iterator[Ioctx]:
        name = object_name(self.kind)
        shown = f"{key} in {name} of {self.place.shown}"
        with (
            self.place.ioctx(f"cannot read or change {shown}") as ioctx,
            compared(shown, errno.ECANCELED),
            present(self.place, name),
        ):
            yield ioctx


def _value(verb: bytes, note: bytes) -> bytes:
    return verb + b" " + note if note else verb
