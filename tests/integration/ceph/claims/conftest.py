"""An image, and clients of its namespace."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import rbd

from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph.image_claims import IMAGE, SIZE, Bench


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
