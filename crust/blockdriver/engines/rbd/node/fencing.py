"""The claims of nodes that are gone: each is cut off as `crust ceph fence` does, without `--even-if-connected`.

A pass has a connection of its own: what fencing sets in librados is not for the engine's other calls.
"""

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from crust.ceph import claim_object, fencing
from crust.ceph.cluster_image import ClusterImage
from crust.ceph.connection import Connection
from crust.ceph.user import CephUser
from crust.core import errors, metrics, volumes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RbdFencing:
    """Of the images of one namespace, by a user that may blocklist: a controller's."""

    who: CephUser
    pool: str
    namespace: str

    def fence(
        self, volume_ids: Iterable[volumes.VolumeId], nodes: frozenset[str]
    ) -> frozenset[str]:
        """Cut these nodes off from these volumes; returns those of which claims are left.

        One that cannot be cut off now, because its client is connected, say, stops no other. Raises
        `errors.PeerUnavailable` as soon as the cluster does not answer.
        """
        connection = Connection(self.who)
        with contextlib.closing(connection):
            left = [self._left(connection, each, nodes) for each in volume_ids]
        return frozenset[str]().union(*left)

    def _left(
        self, connection: Connection, volume_id: volumes.VolumeId, nodes: frozenset[str]
    ) -> frozenset[str]:
        left = set()
        for node in sorted(self._holders(connection, volume_id) & nodes):
            extra = {"volume": volume_id, "node": node}
            try:
                cut = self._fence(connection, volume_id, node)
            except errors.PeerUnavailable:
                raise
            except errors.CrustError as err:
                left.add(node)
                _log.warning(
                    "an image of a node that is gone is not free yet", extra={**extra, "error": err}
                )
            else:
                metrics.claims_fenced.inc()
                _log.warning(
                    "a node that is gone was cut off from an image",
                    extra={**extra, "addresses": cut},
                )
        return frozenset(left)

    def _holders(self, connection: Connection, volume_id: volumes.VolumeId) -> frozenset[str]:
        """The nodes that have claims, and those whose fencing was interrupted."""
        what = f"cannot read the claims on {volume_id}"
        try:
            with connection.pool(self.pool, self.namespace, what) as ioctx:
                claims = claim_object.read(ioctx, volume_id).claims
        except claim_object.UnreadableImageClaim as err:
            _log.warning("the claims on an image are not looked at", extra={"error": err})
            return frozenset()
        return claims.nodes

    def _fence(
        self, connection: Connection, volume_id: volumes.VolumeId, node: str
    ) -> tuple[str, ...]:
        what = f"cannot cut {node} off from {volume_id}"
        with connection.pool(self.pool, self.namespace, what) as ioctx:
            return fencing.fence(ClusterImage(connection, ioctx, volume_id), node)
