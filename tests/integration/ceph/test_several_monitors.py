"""A cluster of three monitors loses one: what is connected goes on, and what starts connects to the others."""

import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning, provisioning
from crust.ceph.connection import Connection
from crust.ceph.failures import CephMonitorsUnreachable
from crust.ceph.user import CephUser
from crust.core import volumes
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph.rbd_images import create

pytestmark = pytest.mark.timeout(240)

SIZE = 8 << 20
Result = TypeVar("Result")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    with ceph_cluster.running(tmp_path_factory.mktemp("ceph") / "c", monitors=3) as cluster:
        yield cluster


def volume(number: int) -> volumes.VolumeId:
    return volumes.VolumeId(f"0123456789abcdef-{number}")


@contextmanager
def controller(who: CephUser, namespace: str) -> Iterator[RbdProvisioning]:
    """A controller that has just started."""
    connection = Connection(who)
    try:
        place = Place(connection, POOL, namespace)
        repeated(RbdPool(place, create=True).open)
        yield provisioning(place)
    finally:
        connection.close()


def repeated(call: Callable[[], Result]) -> Result:
    """As the sidecars repeat a call that is UNAVAILABLE: the other monitors elect a leader meanwhile."""
    while True:
        try:
            return call()
        except CephMonitorsUnreachable:
            continue


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_lost_monitor_stops_neither_a_controller_nor_the_start_of_one(
    three: CephCluster, lost: str
) -> None:
    namespace, user = three.make_namespace(), f"controller-{uuid.uuid4().hex[:8]}"
    who = CephUser(three.monitors, user, three.controller(user, namespace))
    with controller(who, namespace) as running:
        create(running, volume(1), SIZE)
        three.daemons.pop(f"mon.{lost}").end(signal.SIGKILL)
        try:
            repeated(lambda: create(running, volume(2), SIZE))
            running.grow(volume(1), 2 * SIZE)
            with controller(who, namespace) as started:
                assert started.image_ids() == {volume(1), volume(2)}
                assert started.image_bytes(volume(1)) == 2 * SIZE
                repeated(lambda: started.remove(volume(2)))
            assert running.image_ids() == {volume(1)}
        finally:
            three.start_monitors()
