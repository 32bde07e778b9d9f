"""The guest image of the end-to-end tests, whole nodes, and a Ceph cluster."""

import asyncio
import fcntl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import CephCluster
from examples.kata.guest import image
from examples.kata.vm import accel, spec
from tests.support import capabilities
from tests.support.ceph import krbd_bench
from tests.support.ceph.image_node import Storage
from tests.support.nodes.whole_node import WholeNode, whole_node

CACHE = Path(__file__).parents[2] / ".cache" / "guest"


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    capabilities.need("vm")
    with ceph_cluster.running(tmp_path_factory.mktemp("ceph") / "c") as cluster:
        yield cluster


@pytest.fixture
def storage(ceph: CephCluster) -> Storage:
    """A namespace of the pool, with an image."""
    return Storage.make(ceph)


@pytest.fixture(scope="session")
def guest_image() -> image.GuestImage:
    """The guest image; building it is a no-op after the first time."""
    capabilities.need("vm")
    return image.build(CACHE)


@pytest.fixture(scope="session")
def acceleration(guest_image: image.GuestImage) -> spec.Acceleration:
    """What a probe boot found to work."""
    with (CACHE / ".probe.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker probes, the others read what it found
        return asyncio.run(accel.probe(guest_image, CACHE)).kind


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[krbd_bench.Bench]:
    """A node whose kernel has RBD, and a cluster, which the tests of one file share."""
    async with krbd_bench.running(tmp_path_factory.mktemp("krbd")) as made:
        yield made


@pytest_asyncio.fixture
async def fresh_node(guest_image: object, acceleration: object) -> AsyncIterator[WholeNode]:
    """A whole node for one test, which may kill and restart its processes."""
    async with whole_node() as node:
        yield node
        await node.tidy()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_node(guest_image: object, acceleration: object) -> AsyncIterator[WholeNode]:
    """A whole node that the tests of one file share."""
    async with whole_node() as node:
        yield node


@pytest_asyncio.fixture(loop_scope="module")
async def node(shared_node: WholeNode) -> AsyncIterator[WholeNode]:
    """The shared node; what a test created is removed after it."""
    yield shared_node
    await shared_node.tidy()
