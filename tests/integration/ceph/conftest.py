"""A Ceph cluster for the tests of a worker, made once, and a namespace of its own for each test."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from crust.ceph.connection import Connection
from crust.ceph.user import CephUser, Timeouts
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import CephCluster
from tests.support.ceph import rbd_node
from tests.support.ceph.rbd_node import RbdNode

QUICK = Timeouts(connect_s=3, monitors_s=3, data_s=3)


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    """A cluster with a manager, without which no capacity is known. No test breaks it for good."""
    with ceph_cluster.running(tmp_path_factory.mktemp("ceph") / "c", with_mgr=True) as cluster:
        yield cluster


@pytest.fixture
def namespace(ceph: CephCluster) -> str:
    """A namespace of the pool, for one test."""
    return ceph.make_namespace()


@pytest.fixture
def controller(ceph: CephCluster, namespace: str) -> CephUser:
    """A user with a controller's rights in the namespace."""
    name = f"controller-{uuid.uuid4().hex[:8]}"
    return CephUser(ceph.monitors, name, ceph.controller(name, namespace))


@pytest.fixture
def connection(controller: CephUser) -> Iterator[Connection]:
    made = Connection(controller, QUICK)
    yield made
    made.close()


@pytest.fixture
async def node(ceph: CephCluster) -> AsyncIterator[RbdNode]:
    """Controller and node as processes, without a volume."""
    async with rbd_node.serving(ceph) as running:
        yield running


@pytest.fixture
async def cluster(node: RbdNode) -> RbdNode:
    """Controller and node as processes, with a volume and a user for it."""
    node.own = node.secrets("guest")
    node.volume = await node.create("one")
    return node
