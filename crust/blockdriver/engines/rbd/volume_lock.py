"""One controller at a time changes what is stored under a volume's id, and one that comes late reaches nothing.

librbd removes and renames images by name, and compares no record. So a controller that compares one and then sleeps
would remove what another has made of that name since. Who changes an image, or its snapshots, holds the volume's
lock, a key beside the volume's record, and compares the record after it has taken the lock:

    crust.records.records    l.<volume id>    "<address> <process>.<random>" of the holder; absent: free

Every change of the key is one operation of RADOS that requires the value that was read. There is no lease, and no
clocks are compared: whoever finds one value for `PATIENCE_S` of its own time treats the holder as dead. A holder may
only be slow, or sleep, so before the lock changes hands its address is blocklisted, for years, and the map with that
is waited for. From then on every OSD that the successor reaches refuses the holder's operations. All calls inside the
lock are made by the client whose address is in it (`Connection.pinned`): a holder that wakes up gets an error, goes
through none with a new connection, and its caller repeats the call, which reads the records again.

A call that ended by a timeout may still be carried out, so its lock is not given back but left to lie. The same
process may take it again at once: its operations reach an OSD in the order in which it sent them.
"""

import errno
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from crust import errors
from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.engines.protocol import ChangedElsewhere
from crust.blockdriver.engines.rbd import omap
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.records import object_name, records_absent
from crust.ceph import binding, failures
from crust.ceph.failures import CephClientBlocklisted, CephNotAnswering, CephNotPermitted

PATIENCE_S = 15.0
"""Longer than a change takes by far; one that waits for a silent client is ended (`image_change`)."""
OBJECT = object_name(RecordKind.VOLUMES)
_KEY = "l."
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _LocalLock:
    """What this process knows of one lock."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that has the lock, or wants it."""
    users: int = 0
    seen: str = ""
    since_s: float = 0.0


@dataclass(slots=True)
class VolumeLocks:
    """The locks of the volumes in `place`. Safe from any thread."""

    place: Place
    patience_s: float = PATIENCE_S
    now_s: Callable[[], float] = time.monotonic
    _process: str = field(default_factory=lambda: secrets.token_hex(8))
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _here: dict[str, _LocalLock] = field(default_factory=dict)

    @contextmanager
    def held(self, volume_id: str) -> Iterator[None]:
        """Have the lock while the block runs. Raises `ChangedElsewhere`, `CephClientBlocklisted`."""
        with self._thread(volume_id) as here, self.place.connection.pinned() as address:
            value = self._take(volume_id, here, address)
            is_left = False
            try:
                yield
            except (CephNotAnswering, CephClientBlocklisted):
                is_left = True
                raise
            finally:
                if not is_left:
                    self._give_back(volume_id, value)

    @contextmanager
    def _thread(self, volume_id: str) -> Iterator[_LocalLock]:
        """One thread of this process at a time; the others wait for it."""
        with self._guard:
            here = self._here.setdefault(volume_id, _LocalLock())
            here.users += 1
        try:
            if not here.guard.acquire(timeout=2 * PATIENCE_S):
                raise ChangedElsewhere(volume_id, "another call to this controller", PATIENCE_S)
            try:
                yield here
            finally:
                here.guard.release()
        finally:
            with self._guard:
                here.users -= 1
                if not here.users and not here.seen:
                    self._here.pop(volume_id, None)

    def _take(self, volume_id: str, here: _LocalLock, address: str) -> str:
        value = f"{address} {self._process}.{secrets.token_hex(8)}"
        found = self._read(volume_id)
        if found:
            self._check_takeable(volume_id, found, here, address)
        if not self._swap(volume_id, found, value):
            raise ChangedElsewhere(volume_id, "it was first", self.patience_s)
        here.seen = ""
        return value

    def _check_takeable(self, volume_id: str, found: str, here: _LocalLock, address: str) -> None:
        """Cut off a holder that is treated as dead; raise `ChangedElsewhere` as long as it is not."""
        holder, _, token = found.partition(" ")
        if holder == address:
            return  # left by a call of this very client, which has ended
        is_own = token.startswith(f"{self._process}.")
        if here.seen != found:
            here.seen, here.since_s = found, self.now_s()
        if not is_own and self.now_s() - here.since_s < self.patience_s:
            raise ChangedElsewhere(volume_id, f"the client {holder}", self.patience_s)
        try:
            self.place.connection.blocklist((holder,))
        except CephNotPermitted as err:
            raise ChangedElsewhere(volume_id, f"the client {holder}", self.patience_s) from err
        extra = {"volume_id": volume_id, "client": holder}
        _log.warning("a controller that does not go on is cut off", extra=extra)

    def _read(self, volume_id: str) -> str:
        with self._object(f"cannot look who changes {volume_id}") as ioctx:
            return (
                omap.read_keys(ioctx, OBJECT, (_KEY + volume_id,))
                .get(_KEY + volume_id, b"")
                .decode()
            )

    def _swap(self, volume_id: str, found: str, value: str) -> bool:
        """Whether the lock was what it was, and is `value` now; "" is a free one."""
        key = _KEY + volume_id
        with self._object(f"cannot lock {volume_id}") as ioctx:
            try:
                if value:
                    omap.put(ioctx, OBJECT, {key: value.encode()}, expected={key: found})
                else:
                    omap.drop(ioctx, OBJECT, (key,), expected={key: found})
            except binding.load().failures as err:
                if failures.errno_of(err) != errno.ECANCELED:
                    raise
                return False
        return True

    def _give_back(self, volume_id: str, value: str) -> None:
        """What fails is left to lie, for the patience of the next: the change itself is made, or was refused."""
        try:
            self._swap(volume_id, value, "")
        except errors.CrustError:
            return

    @contextmanager
    def _object(self, what: str) -> Iterator[binding.Ioctx]:
        with self.place.ioctx(what) as ioctx:
            try:
                yield ioctx
            except binding.load().failures as err:
                if failures.errno_of(err) != errno.ENOENT:
                    raise
                raise records_absent(self.place, OBJECT) from err
