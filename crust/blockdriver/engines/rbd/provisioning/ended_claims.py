"""Images whose clients ended without closing them are freed by the controller, on a thread of its own.

A node seldom has the right to blocklist, and a pod that waits asks nobody. So the claims of all images are read, 0.5
ms each, and the ended ones are cut off (`crust.ceph.fencing`). After a pass comes a pause ten times as long, and of
`PAUSE_S` at least. A claim that cannot be freed now keeps no other from it, and is in the log once.
"""

import logging
import threading
import time

from crust.blockdriver.engines.rbd.place import Place
from crust.ceph import claim_object, fencing
from crust.ceph.failures import CephConnectionClosed
from crust.core import errors

PAUSE_S = 1.0
_PAUSE_FACTOR = 10

_log = logging.getLogger(__name__)


class EndedClaims:
    """The thread, from `start` to `stop`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._ends = threading.Event()
        self._ends.set()
        self._told: set[str] = set()
        """Images that could not be freed, as the log has them."""

    def start(self) -> None:
        """Begin to look, unless it runs."""
        if self._ends.is_set():
            self._ends = threading.Event()
            threading.Thread(
                target=self._run, args=(self._ends,), name="rbd-ended-claims", daemon=True
            ).start()

    def stop(self) -> None:
        """End at the next image: what it does is done again from its beginning by whoever comes next."""
        self._ends.set()

    def _run(self, ends: threading.Event) -> None:
        pause_s = PAUSE_S
        while not ends.wait(pause_s):
            began_s = time.monotonic()
            try:
                self.look(ends)
            except CephConnectionClosed:
                return
            except errors.CrustError as err:
                _log.warning("the claims on images are not looked at", extra={"error": err})
            pause_s = max(PAUSE_S, _PAUSE_FACTOR * (time.monotonic() - began_s))

    def look(self, ends: threading.Event | None = None) -> None:
        """Free every image whose holders have ended. Raises what listing the images raises."""
        with self._place.ioctx(f"cannot list {self._place.shown}") as ioctx:
            names = self._place.names(ioctx)
        self._told &= set(names)
        for name in names:
            if ends is not None and ends.is_set():
                return
            try:
                self._free(name)
                self._told.discard(name)
            except errors.PeerUnavailable:
                raise
            except errors.CrustError as err:
                if name not in self._told:
                    extra = {"image": name, "error": err}
                    _log.warning("an image whose client has ended is not free yet", extra=extra)
                self._told.add(name)

    def _free(self, name: str) -> None:
        with self._place.ioctx(f"cannot free the image {name}") as ioctx:
            if not claim_object.read(ioctx, name).claims.ended:
                return
            cut = fencing.cut_off(self._place.claimed(ioctx, name))
        extra = {"image": name, "clients": cut}
        _log.warning("clients that ended without closing an image are cut off", extra=extra)
