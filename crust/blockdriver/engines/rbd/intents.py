"""What is half made or half removed in the pool: one key for such a volume, its intent, beside the volume records.

    crust.records.volumes    i.<volume id>    "make", or "remove" and the volume record

A record and an intent of a volume are changed by one operation of RADOS. So a volume exists, or it has an intent, or
nothing is known of it; an image without both was made by somebody else, or its record was lost.

    begin            the intent "make", before the image
    commit           the record in place of the intent "make"
    begin_removal    the intent "remove" in place of the record, before the image goes
    put_back         the record in place of the intent "remove": somebody has the image
    end              no intent: nothing of the volume is left
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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

_OBJECT = object_name(RecordKind.VOLUMES)
_INTENT = "i."
_MAKE, _REMOVE = "make", b"remove "


@dataclass(frozen=True, slots=True)
class State:
    """What there is of a volume: its `record`; or it is half made; or half removed, and that was its record."""

    record: bytes | None = None
    is_half_made: bool = False
    removed: bytes | None = None


@dataclass(frozen=True, slots=True)
class Intents:
    """The intents of the volumes in `place`. Each change raises `RecordChanged` if another state is there."""

    place: Place

    def ids(self) -> tuple[str, ...]:
        """The volumes that have an intent."""
        with self._opened("the intents") as ioctx:
            return tuple(key for key, _ in omap.read(ioctx, _OBJECT, _INTENT))

    def state(self, volume_id: str) -> State:
        """What there is of a volume now."""
        data, intent = DATA + volume_id, _INTENT + volume_id
        with self._opened(volume_id) as ioctx:
            found = omap.read_keys(ioctx, _OBJECT, (data, intent))
        noted = found.get(intent, b"")
        removed = noted.removeprefix(_REMOVE) if noted.startswith(_REMOVE) else None
        return State(found.get(data), noted == _MAKE.encode(), removed)

    def begin(self, volume_id: str) -> None:
        """Note that a volume is made, which does not exist."""
        intent, absent = {_INTENT + volume_id: _MAKE.encode()}, {DIGEST + volume_id: ""}
        with self._opened(volume_id) as ioctx:
            omap.put(ioctx, _OBJECT, intent, expected=absent)

    def commit(self, volume_id: str, record: bytes) -> None:
        """Have the record of a volume that is half made."""
        intent = _INTENT + volume_id
        expected = {DIGEST + volume_id: "", intent: _MAKE}
        with self._opened(volume_id) as ioctx:
            omap.put(
                ioctx, _OBJECT, values(volume_id, record), dropped=(intent,), expected=expected
            )

    def begin_removal(self, volume_id: str, record: bytes) -> None:
        """Note that a volume is removed, in place of its record."""
        intent, keys = {_INTENT + volume_id: _REMOVE + record}, tuple(values(volume_id, record))
        expected = {DIGEST + volume_id: digest(record)}
        with self._opened(volume_id) as ioctx:
            omap.put(ioctx, _OBJECT, intent, dropped=keys, expected=expected)

    def put_back(self, volume_id: str, record: bytes) -> None:
        """Have the record of a volume that is half removed again."""
        intent, absent = _INTENT + volume_id, {DIGEST + volume_id: ""}
        with self._opened(volume_id) as ioctx:
            omap.put(ioctx, _OBJECT, values(volume_id, record), dropped=(intent,), expected=absent)

    def end(self, volume_id: str) -> None:
        """Forget the intent of a volume of which nothing is left."""
        with self._opened(volume_id) as ioctx:
            omap.drop(ioctx, _OBJECT, (_INTENT + volume_id,))

    @contextmanager
    def _opened(self, volume_id: str) -> Iterator[Ioctx]:
        shown = f"{volume_id} in {_OBJECT} of {self.place.shown}"
        with (
            self.place.ioctx(f"cannot read or change {shown}") as ioctx,
            compared(shown, errno.ECANCELED),
            present(self.place, _OBJECT),
        ):
            yield ioctx
