"""An engine in a namespace of its own, and a client that writes to its images."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.ceph.connection import Connection
from examples.cluster.ceph_cluster import POOL, CephCluster


@pytest.fixture
def engine(connection: Connection, namespace: str, tmp_path: Path) -> RbdProvisioning:
    """The engine with a new pool; its background work is done when a test says so."""
    place = Place.of(connection, POOL, namespace)
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
