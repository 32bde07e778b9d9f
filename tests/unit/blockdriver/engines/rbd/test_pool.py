"""A pool in Ceph, as far as no cluster is needed."""

from typing import cast

from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.core import errors
from tests.support.raised import raised


class StuckClient:
    """A client of a cluster that answers by now; a connection that is older never learns it."""

    def __init__(self) -> None:
        self.is_open = False
        self.connections = 0

    def check_namespace(self, pool: str, namespace: str) -> None:
        """Connect, if it is not connected, and ask."""
        if not self.is_open:
            self.is_open = True
            self.connections += 1
        if self.connections == 1:
            raise errors.PeerUnavailable.named("CephNotAnswering", "cannot look for the namespace")
        raise errors.NotReady.named("CephNamespaceMissing", namespace)

    def reopen(self) -> None:
        """Connect at the next call."""

    def close(self) -> None:
        self.is_open = False


def test_silent_cluster_is_asked_by_new_connection_next_time() -> None:
    client = StuckClient()
    pool = RbdPool(Namespace.of(cast("Connection", client), "rbd", "crust"))
    with raised("CephNotAnswering"):
        pool.find()
    with raised("CephNamespaceMissing"):
        pool.find()
    assert client.connections == 2
