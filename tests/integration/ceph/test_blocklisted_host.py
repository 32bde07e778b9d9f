"""A host whose address an administrator has put on Ceph's blocklist: each call says so, and works when it is off it.

The cluster's daemons have an address of their own here, so that the entry of the clients' host cuts off no daemon.
"""

import contextlib
import os
import signal
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from crust.blockdriver.ceph.binding import CephMonitorsUnreachable
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.user import CephUser
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.core import volumes
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph.rbd_driver import RbdDriver
from tests.support.ceph.rbd_images import create
from tests.support.ceph.rbd_node import RbdNode
from tests.support.faults import refusals
from tests.support.faults.refusals import refused

DAEMONS = "127.0.0.2"
CLIENTS = "127.0.0.1"
"""What Linux gives a connection to any address of the loopback network."""
ENTRIES = {"host": {"addr": f"{CLIENTS}:0/0"}, "range": {"range": "range", "addr": f"{CLIENTS}/32"}}
WORDS = ("has blocklisted", f", {CLIENTS}:0/", "`ceph osd blocklist rm ADDRESS:0/0`")
THREADS_OF_A_CONNECTION = 30
"""More than librados starts for one."""


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    """With a manager, without which no capacity is known."""
    directory = tmp_path_factory.mktemp("ceph") / "c"
    with ceph_cluster.running(directory, with_mgr=True, host=DAEMONS) as running:
        yield running


@contextlib.contextmanager
def blocklisted(ceph: CephCluster, kind: str) -> Iterator[None]:
    """The clients' host is on the blocklist while the block runs."""
    ceph.command("osd blocklist", blocklistop="add", **ENTRIES[kind])
    try:
        yield
    finally:
        ceph.command("osd blocklist", blocklistop="rm", **ENTRIES[kind])


def pid_of(driver: RbdDriver) -> int:
    return int(driver.pid.read_text())


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def until_refused(call: Callable[[], Awaitable[Any]]) -> str:
    """Until the OSD has the map with the entry: before, a call may be answered as ever. Never anything else."""
    while True:
        try:
            await call()
        except grpc.aio.AioRpcError as err:
            if err.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return err.details() or ""


@pytest.mark.parametrize("kind", ENTRIES)
async def test_controller_on_a_blocklisted_host_goes_on(cluster: RbdNode, kind: str) -> None:
    pid, volume_id = pid_of(cluster.controller_driver), cluster.volume
    absent = volume_id[:-8] + "0" * 8
    before = threads(pid)
    with blocklisted(cluster.ceph, kind):
        await until_refused(lambda: cluster.delete(absent))
        for _ in range(5):
            await refused(cluster.create("two"), grpc.StatusCode.UNAVAILABLE, *WORDS)
            await refused(cluster.delete(volume_id), grpc.StatusCode.UNAVAILABLE, *WORDS)
        assert threads(pid) < before + THREADS_OF_A_CONNECTION
    # the OSD gets the map without the entry, and the driver looks again
    await refusals.repeated(lambda: cluster.delete(absent), grpc.StatusCode.UNAVAILABLE)
    assert cluster.images() == [volume_id], "nothing was made or deleted"
    made = await cluster.create("two")
    assert sorted(cluster.images()) == sorted((volume_id, made))
    await cluster.delete(volume_id)
    await cluster.delete(made)
    assert cluster.images() == []
    assert pid_of(cluster.controller_driver) == pid
    assert threads(pid) < before + THREADS_OF_A_CONNECTION


@pytest.mark.parametrize("kind", ENTRIES)
async def test_node_on_a_blocklisted_host_goes_on_later(cluster: RbdNode, kind: str) -> None:
    pid, ceph = pid_of(cluster.driver), cluster.ceph
    await cluster.stage()
    await cluster.publish()
    before = threads(pid)
    # The controller looks at its pool once a second, and would be counted.
    with stopped(pid_of(cluster.controller_driver)), blocklisted(ceph, kind):
        await until_refused(cluster.stage)
        calls = 5 * (cluster.stage, cluster.publish)
        sessions = ceph.sessions_made()
        for call in calls:
            await refused(call(), grpc.StatusCode.UNAVAILABLE, *WORDS)
        assert ceph.sessions_made() - sessions <= len(calls)
        # what this host itself has is known without the cluster
        await refused(cluster.unstage(), grpc.StatusCode.FAILED_PRECONDITION, "[StillPublished]")
        assert threads(pid) < before + THREADS_OF_A_CONNECTION
    await refusals.repeated(cluster.stage, grpc.StatusCode.UNAVAILABLE)
    assert (await cluster.publish()).network_image.image == cluster.volume
    await refusals.repeated(cluster.leave, grpc.StatusCode.UNAVAILABLE)
    assert cluster.images() == []
    assert pid_of(cluster.driver) == pid


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
        place = Namespace.of(connection, POOL, namespace)
        repeated(RbdPool(place, create=True).open)
        yield RbdProvisioning(place)
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
def test_lost_monitor_stops_neither_controller_nor_start_of_one(
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
