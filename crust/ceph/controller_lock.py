"""The lock of a pool: one controller changes it at a time, and its client is the one client of crust.

    crust.controller    holder   "<address> <nonce> <beat>" of the active controller; absent: free

The address is that of the controller's client, the nonce that of its run directory, which one process has at a time.
The beat is renewed every `RENEW_S`. Every change of the key is one operation of RADOS that requires the value that
was read. There is no lease, and no clocks are compared.

    free                            taken
    another nonce, a new value      this controller stands by
    another nonce, one value for    its holder is treated as dead: its address is blocklisted, the map with that is
    `PATIENCE_S` of our own time    waited for, and only then the lock is taken
    our nonce, another address      a client of ours that has ended, or of our dead predecessor: the same, at once

From the map on every OSD that the successor reaches refuses what the late holder sends, also what it sent before. A
holder that wakes up gets an error from its client, and its `Connection` gives out a new one only after `admit` has
put the new address into the lock. Where the lock has another nonce by then, `ControllerReplaced` ends the process. So
all changes are made by the client whose address is in the lock, and none by a controller that was replaced.

The key is given back by a client of which no call has an unknown outcome (`Connection.close`). Any other leaves the
key, and the next controller blocklists the address first: what such a call has sent may still be carried out.

`crust ceph fence`, the fencing of lost nodes and the freeing of ended claims need no lock. They change claims, by
compare-and-swap, and the blocklist, where an entry harms nobody but its own dead client; they change no image, no
record and no snapshot.
"""

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from crust.ceph import failures, omap
from crust.ceph.binding import Ioctx
from crust.core import errors

OBJECT = "crust.controller"
_KEY = "holder"
RENEW_S = 5.0
PATIENCE_S = 30.0
"""Six beats: longer than each call of a holder that lives may take (`crust.ceph.user.Timeouts`)."""

BlocklistClient = Callable[[str], None]
"""Cuts off the client with an address, and waits for the map that says so."""

_log = logging.getLogger(__name__)


class ControllerStandsBy(errors.PeerUnavailable):
    """Another controller serves the pool; this one takes over when the other one has ended."""

    def __init__(self, address: str) -> None:
        super().__init__(
            "this controller stands by",
            why=f"the controller with the client {address} serves the pool",
            hint=f"call that one; if it has ended, this one takes over {PATIENCE_S:g} s after its last sign of life",
        )


class ControllerReplaced(errors.PeerUnavailable):
    """Another controller has taken the pool over, so that this process must not change it any more."""

    def __init__(self, address: str) -> None:
        super().__init__(
            "this controller was replaced, and ends",
            why=f"it gave no sign of life for {PATIENCE_S:g} s, and the client {address or '(none)'} has the pool's "
            "lock now",
            hint="started again it stands by; find out what stopped it: a paused machine, a network that was away",
        )


@dataclass(frozen=True, slots=True)
class _Holder:
    address: str
    nonce: str
    beat: int

    @classmethod
    def of(cls, value: str) -> "_Holder":
        address, nonce, beat = [*value.split(" "), "", ""][:3]
        return cls(address, nonce, int(beat) if beat.isdigit() else 0)

    @property
    def value(self) -> str:
        return f"{self.address} {self.nonce} {self.beat}"


@dataclass(slots=True)
class ControllerLock:
    """The lock of `pool`/`namespace` for the process with this nonce. Methods raise the binding's own errors too."""

    pool: str
    namespace: str
    nonce: str
    patience_s: float = PATIENCE_S
    now_s: Callable[[], float] = time.monotonic
    is_ours: bool = False
    _seen: str = ""
    _since_s: float = 0.0

    def take(self, ioctx: Ioctx, address: str, blocklist: BlocklistClient) -> None:
        """Become the active controller, whose client has `address`. Raises `ControllerStandsBy`."""
        value = read(ioctx)
        if value and _Holder.of(value).nonce != self.nonce:
            self._check_dead(value)
        self.is_ours = True  # before the swap: a client that replaces this one meanwhile is admitted, or refused
        try:
            if not self._put(ioctx, value, address, blocklist):
                raise ControllerStandsBy(_Holder.of(read(ioctx)).address)
        except BaseException:
            self.is_ours = False
            raise

    def admit(self, ioctx: Ioctx, address: str, blocklist: BlocklistClient) -> None:
        """Before a new client of this process is given out: its address replaces that of the one before, if this is
        the active controller. Raises `ControllerReplaced`.
        """
        while self.is_ours:
            if self._put(ioctx, self._own(ioctx), address, blocklist):
                return

    def renew(self, ioctx: Ioctx) -> None:
        """Give a sign of life. Raises `ControllerReplaced`."""
        value = self._own(ioctx)
        holder = _Holder.of(value)
        # of a new client that is admitted meanwhile the address stands, and that was a sign of life
        _replaced(ioctx, value, _Holder(holder.address, self.nonce, holder.beat + 1).value)

    def give_back(self, ioctx: Ioctx) -> None:
        """Free the lock, if it is ours: no call of our client can be carried out any more."""
        was_ours, self.is_ours = self.is_ours, False
        value = read(ioctx)
        if was_ours and _Holder.of(value).nonce == self.nonce:
            _replaced(ioctx, value, "")

    def _own(self, ioctx: Ioctx) -> str:
        value = _present(ioctx)
        if _Holder.of(value).nonce != self.nonce:
            raise ControllerReplaced(_Holder.of(value).address)
        return value

    def _check_dead(self, value: str) -> None:
        if value != self._seen:
            self._seen, self._since_s = value, self.now_s()
        if self.now_s() - self._since_s < self.patience_s:
            raise ControllerStandsBy(_Holder.of(value).address)

    def _put(self, ioctx: Ioctx, value: str, address: str, blocklist: BlocklistClient) -> bool:
        """Cut off the client that the lock has, and put this one in its place; whether nobody else was first."""
        holder = _Holder.of(value)
        if holder.address not in ("", address):
            blocklist(holder.address)
            extra = {"client": holder.address}
            _log.warning("a controller that gave no sign of life is cut off", extra=extra)
        return _replaced(ioctx, value, _Holder(address, self.nonce, holder.beat + 1).value)


def make(ioctx: Ioctx) -> None:
    """Make the object, with the pool: in a full one a key can be set, and no object be made."""
    omap.make(ioctx, OBJECT)


def read(ioctx: Ioctx) -> str:
    """The value of the lock; empty if it is free. Raises ENOENT without the object."""
    return omap.read_keys(ioctx, OBJECT, (_KEY,)).get(_KEY, b"").decode("ascii", "replace")


def unknown_clients(ioctx: Ioctx, look: Callable[[], frozenset[str]]) -> frozenset[str]:
    """Those of the addresses that `look` finds that are not the active controller's.

    It has an image open to flatten it, grow it, or take a snapshot, and never writes a guest's data; librbd hands its
    lock over between it and a hypervisor. The lock is read before, because the controller may end, and after, because
    one may begin.
    """
    before = _Holder.of(_present(ioctx)).address
    found = look() - {before}
    return found - {_Holder.of(_present(ioctx)).address} if found else found


def _present(ioctx: Ioctx) -> str:
    """The value of the lock; empty also where the pool or its lock was removed."""
    with failures.ignoring(errno.ENOENT):
        return read(ioctx)
    return ""


def _replaced(ioctx: Ioctx, before: str, after: str) -> bool:
    """Whether the lock was `before`, and is `after` now; "" is a free one."""
    return omap.swap(ioctx, OBJECT, {_KEY: before}, {_KEY: after.encode("ascii") or None})
