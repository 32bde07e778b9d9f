"""A pool in Ceph that is looked for while the cluster comes back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.ceph.controller_lock import ControllerLock
from crust.ceph.failures import CephNamespaceMissing, CephNotAnswering
from crust.ceph.user import CephUser


class StuckClient:
    """A client of a cluster that answers by now; a connection that is older never learns it."""

    is_lent: ClassVar[bool] = False
    who = CephUser("v2:192.0.2.1:3300", "controller", "key")

    controller_lock: ControllerLock | None = None

    def __init__(self) -> None:
        self.is_open = False
        self.connections = 0

    def check_namespace(self, pool: str, namespace: str) -> None:
        """Connect, if it is not connected, and ask."""
        if not self.is_open:
            self.is_open = True
            self.connections += 1
        if self.connections == 1:
            raise CephNotAnswering("cannot look for the namespace")
        raise CephNamespaceMissing(pool, namespace)

    def reopen(self) -> None:
        """Connect at the next call."""

    def close(self) -> None:
        """Disconnect."""
        self.is_open = False

    @contextmanager
    def pool(self, pool: str, namespace: str, what: str) -> Iterator[Any]:
        """Not reached."""
        raise AssertionError(what)
        yield

    @contextmanager
    def cluster(self, what: str) -> Iterator[Any]:
        """Not reached."""
        raise AssertionError(what)
        yield

    @contextmanager
    def endable(self) -> Iterator[Callable[[], str]]:
        """Not reached."""
        raise AssertionError
        yield

    def command(self, prefix: str, **arguments: object) -> bytes:
        """Not reached."""
        raise AssertionError(prefix)

    def fsid(self) -> str:
        """Not reached."""
        raise AssertionError

    def address(self) -> str:
        """Not reached."""
        raise AssertionError

    def blocklist(self, addresses: Iterable[str]) -> None:
        """Not reached."""
        raise AssertionError


def test_cluster_that_does_not_answer_is_asked_by_a_new_connection_the_next_time() -> None:
    client = StuckClient()
    pool = RbdPool(Place(client, "rbd", "crust"))
    with pytest.raises(CephNotAnswering):
        pool.find()
    with pytest.raises(CephNamespaceMissing):
        pool.find()
    assert client.connections == 2
