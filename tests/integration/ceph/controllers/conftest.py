"""A Ceph cluster with a manager, without which no capacity is known, and controllers of a new pool in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import CephCluster
from tests.support.ceph.rbd_controllers import Controllers


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    """The cluster of this folder."""
    with ceph_cluster.running(tmp_path_factory.mktemp("ceph") / "c", with_mgr=True) as cluster:
        yield cluster


@pytest.fixture
def controllers(ceph: CephCluster, tmp_path: Path) -> Iterator[Controllers]:
    """Controllers of a new pool."""
    made = Controllers(ceph, tmp_path)
    yield made
    made.end()
