"""The controller frees images of clients that ended without closing them, and of nodes that are gone.

A node seldom has the right to blocklist, and a waiting pod has none. So a thread reads the claims of each image, and
cuts the ended ones off (`crust.blockdriver.ceph.fencing`). After a look it pauses ten times as long, and a second at
least. It cuts off nodes that were declared gone as `crust ceph fence` without `--even-if-connected`. A claim that
cannot be freed now does not stop the others.
"""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from crust.blockdriver.ceph import claim_object, fencing
from crust.blockdriver.engines.rbd.provisioning.background import Looks
from crust.core import errors, metrics, volumes

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Freeing(Looks):
    """Frees the images of `place`, as a user that may blocklist."""

    name = "rbd-freeing"
    least_pause_s = 1.0
    pause_factor = 10
    """Looks cost a tenth of a thread's time at most."""

    _told: set[str] = field(default_factory=set, init=False)
    """Images that could not be freed and are in the log."""

    def look(self, ends: threading.Event | None = None) -> None:
        """Free every image whose holders have ended. Raises the errors of the list of images."""
        with self._place.ioctx(f"cannot list {self._place.shown}") as ioctx:
            names = claim_object.images(ioctx)
        self._told &= set(names)
        for name in names:
            if ends is not None and ends.is_set():
                return
            extra: dict[str, object] = {"image": name}
            try:
                with self._place.ioctx(f"cannot free the image {name}") as ioctx:
                    has_ended = bool(claim_object.read(ioctx, name).claims.ended)
                    if has_ended:
                        extra["clients"] = fencing.cut_off(self._place.claimed(ioctx, name))
                self._told.discard(name)
            except errors.PeerUnavailable:
                raise
            except errors.CrustError as err:
                if name not in self._told:
                    text = "an image whose client has ended is not free yet"
                    _log.warning(text, extra={**extra, "error": err})
                self._told.add(name)
                continue
            if has_ended:
                text = "clients that ended without closing an image are cut off"
                _log.warning(text, extra=extra)

    def fence(
        self, volume_ids: Iterable[volumes.VolumeId], nodes: frozenset[str]
    ) -> frozenset[str]:
        """Cut these nodes off from these volumes; returns the nodes whose claims are left.

        A node that cannot be cut off now, such as one with a connected client, does not stop the others. Raises
        `errors.PeerUnavailable` as soon as the cluster does not answer.
        """
        still_claimed = set[str]()
        for volume_id in volume_ids:
            with self._place.ioctx(f"cannot read the claims on {volume_id}") as ioctx:
                try:
                    claims = claim_object.read(ioctx, volume_id).claims
                except claim_object.UnreadableImageClaim as err:
                    _log.warning("the claims on an image are not looked at", extra={"error": err})
                    continue
            for node in sorted(claims.nodes & nodes):
                extra: dict[str, object] = {"volume": volume_id, "node": node}
                try:
                    with self._place.ioctx(f"cannot cut {node} off from {volume_id}") as ioctx:
                        cut = fencing.fence(self._place.claimed(ioctx, volume_id), node)
                except errors.PeerUnavailable:
                    raise
                except errors.CrustError as err:
                    still_claimed.add(node)
                    text = "an image of a node that is gone is not free yet"
                    _log.warning(text, extra={**extra, "error": err})
                    continue
                metrics.claims_fenced.inc()
                extra["addresses"] = cut
                _log.warning("a node that is gone was cut off from an image", extra=extra)
        return frozenset(still_claimed)
