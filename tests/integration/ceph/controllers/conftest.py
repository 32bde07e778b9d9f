"""Controllers of a new pool of the cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.cluster.ceph_cluster import CephCluster
from tests.support.ceph.rbd_controllers import Controllers


@pytest.fixture
def controllers(ceph: CephCluster, tmp_path: Path) -> Iterator[Controllers]:
    made = Controllers(ceph, tmp_path)
    yield made
    made.end()
