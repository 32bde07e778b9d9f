"""A Ceph cluster for the tests of a worker, made once; for each test a namespace, and what uses it."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import rbd

from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.user import CephUser, Timeouts
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import rbd_node
from tests.support.ceph.image_claims import IMAGE, SIZE, Bench
from tests.support.ceph.rbd_controllers import Controllers
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


@pytest.fixture
def bench(ceph: CephCluster, namespace: str) -> Iterator[Bench]:
    """The image, and clients of its namespace that are closed in the end."""
    with ExitStack() as held:
        made = Bench(ceph, namespace, held)
        with ceph.ioctx(POOL, namespace) as ioctx:
            rbd.RBD().create(ioctx, IMAGE, SIZE, old_format=False, features=61)
            with rbd.Image(ioctx, IMAGE) as image:
                image.metadata_set("crust.volume", IMAGE)
        yield made


@pytest.fixture
def controllers(ceph: CephCluster, tmp_path: Path) -> Iterator[Controllers]:
    made = Controllers(ceph, tmp_path)
    yield made
    made.end()


@pytest.fixture
def engine(connection: Connection, namespace: str, tmp_path: Path) -> RbdProvisioning:
    """The engine with a new pool; its background work is done when a test says so."""
    place = Namespace.of(connection, POOL, namespace)
    pool = RbdPool(place, run_dir=str(tmp_path), create=True)
    pool.lock()
    pool.open()
    return RbdProvisioning(place)


@pytest.fixture
def guest(ceph: CephCluster, namespace: str) -> Iterator[Any]:
    """The namespace as a client has it that writes to images: a connection of its own."""
    user = f"node-{uuid.uuid4().hex[:8]}"
    connected = ceph.connected(user, ceph.node(user, namespace))
    ioctx = connected.open_ioctx(POOL)
    ioctx.set_namespace(namespace)
    yield ioctx
    ioctx.close()
    connected.shutdown()
