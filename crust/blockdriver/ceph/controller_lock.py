"""The lock of a pool: one controller changes it at a time, and its client is the one client of crust.

    crust.controller    holder   "<address> <nonce> <beat>" of the active controller; absent: free

The address names the controller's client, the nonce its run directory, which one process has at a time. The
controller renews the beat every `RENEW_S`. Every change of the key is one operation of RADOS that requires the value
that was read. There is no lease, and no clocks are compared.

    the lock is free                the controller takes it
    another nonce, a new value      the controller stands by
    another nonce, one value for    the controller treats the holder as dead: it blocklists the address, waits for the
    `PATIENCE_S` of our own time    map, and then takes the lock
    our nonce, another address      it is an ended client of ours, or of our dead predecessor: the same, at once

With this map every OSD that the successor reaches refuses all requests of the late holder, even older ones. A holder
that wakes up gets an error from its client, and its `Connection` gives out a new client only after `admit` has put
the new address into the lock. If the lock has another nonce then, `ControllerReplaced` ends the process. So the
client whose address is in the lock makes all changes, and a replaced controller makes none.

A client gives the key back if the outcome of all its calls is known (`Connection.close`). Otherwise it leaves the
key, and the next controller blocklists the address first: such a call may still be carried out.

`crust ceph fence`, the fencing of lost nodes and the freeing of ended claims need no lock. They change claims, by
compare-and-swap, and the blocklist, whose entry affects only its own dead client; they change no image, no record and
no snapshot.
"""

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from crust.blockdriver.ceph import omap
from crust.blockdriver.ceph.binding import Ioctx, ignoring
from crust.core import errors

OBJECT = "crust.controller"
_KEY = "holder"
RENEW_S = 5.0
PATIENCE_S = 30.0
"""Six beats: longer than each call of a holder that lives may take (`crust.blockdriver.ceph.user.Timeouts`)."""

BlocklistClient = Callable[[str], None]
"""Cuts off the client with an address, and waits for the map with that."""

_log = logging.getLogger(__name__)


class ControllerStandsBy(errors.PeerUnavailable):
    def __init__(self, address: str) -> None:
        super().__init__(
            "this controller stands by",
            why=f"the controller with the client {address} serves the pool",
            hint=f"call that one; if it has ended, this one takes over {PATIENCE_S:g} s after its last sign of life",
        )


class ControllerReplaced(errors.PeerUnavailable):
    def __init__(self, address: str) -> None:
        super().__init__(
            "this controller was replaced, and ends",
            why=f"it gave no sign of life for {PATIENCE_S:g} s, and the client {address or '(none)'} has the pool's "
            "lock now",
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
            if value != self._seen:
                self._seen, self._since_s = value, self.now_s()
            if self.now_s() - self._since_s < self.patience_s:
                raise ControllerStandsBy(_Holder.of(value).address)
        self.is_ours = True  # before the swap: a client that replaces this one meanwhile is admitted, or refused
        try:
            if not self._put(ioctx, value, address, blocklist):
                raise ControllerStandsBy(_Holder.of(read(ioctx)).address)
        except BaseException:
            self.is_ours = False
            raise

    def admit(self, ioctx: Ioctx, address: str, blocklist: BlocklistClient) -> None:
        """If this controller is active, put a new client's address into the lock. Raises `ControllerReplaced`."""
        while self.is_ours:
            if self._put(ioctx, self._own(ioctx), address, blocklist):
                return

    def renew(self, ioctx: Ioctx) -> None:
        """Give a sign of life. Raises `ControllerReplaced`."""
        value = self._own(ioctx)
        holder = _Holder.of(value)
        # if a new client is admitted meanwhile, its address stays, and is a sign of life
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

    def _put(self, ioctx: Ioctx, value: str, address: str, blocklist: BlocklistClient) -> bool:
        """Cut off the client in the lock, and put this one in its place; false if another controller was first."""
        holder = _Holder.of(value)
        if holder.address not in ("", address):
            blocklist(holder.address)
            extra = {"client": holder.address}
            _log.warning("a controller that gave no sign of life is cut off", extra=extra)
        return _replaced(ioctx, value, _Holder(address, self.nonce, holder.beat + 1).value)


def read(ioctx: Ioctx) -> str:
    """The value of the lock; empty if it is free. Raises ENOENT without the object."""
    return omap.read_keys(ioctx, OBJECT, (_KEY,)).get(_KEY, b"").decode("ascii", "replace")


def unknown_clients(ioctx: Ioctx, look: Callable[[], frozenset[str]]) -> frozenset[str]:
    """The addresses that `look` finds, without the active controller's.

    The controller opens an image to flatten it, grow it, or take a snapshot, and never writes a guest's data; librbd
    hands its lock over between the controller and a hypervisor. The lock is read before, because the controller may
    end, and after, because another may begin.
    """
    before = _Holder.of(_present(ioctx)).address
    clients = look() - {before}
    return clients - {_Holder.of(_present(ioctx)).address} if clients else clients


def _present(ioctx: Ioctx) -> str:
    """The value of the lock; empty also if the pool or its lock was removed."""
    with ignoring(errno.ENOENT):
        return read(ioctx)
    return ""


def _replaced(ioctx: Ioctx, before: str, after: str) -> bool:
    """Whether the lock was `before`, and is `after` now; "" is a free lock."""
    return omap.swap(ioctx, OBJECT, {_KEY: before}, {_KEY: after.encode("ascii") or None})
