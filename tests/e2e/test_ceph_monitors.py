"""A Ceph cluster of three monitors loses the first of them: guests go on, and new ones open their images."""

import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import CephCluster
from tests.support.ceph.image_node import IMAGE, ImageNode, Storage, image_node

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    with ceph_cluster.running(tmp_path_factory.mktemp("ceph") / "c", monitors=3) as cluster:
        yield cluster


@pytest.fixture
def storage(three: CephCluster) -> Storage:
    return Storage.make(three)


@pytest.fixture
async def node(
    storage: Storage, guest_image: object, acceleration: object
) -> AsyncIterator[ImageNode]:
    async with image_node("node-a", storage) as made:
        yield made


async def test_dead_monitor_stops_neither_a_guest_nor_the_next_one(
    node: ImageNode, storage: Storage
) -> None:
    target = await node.publish()
    assert await node.output("one", target, "echo kept > /data/f; sync; cat /data/f") == "kept"
    storage.ceph.daemons.pop("mon.a").end(signal.SIGKILL)
    assert await node.output("one", target, "echo after >> /data/f; sync; wc -l < /data/f") == "2"
    await node.runtime.stop("one")
    assert await node.output("two", target, "cat /data/f") == "kept\nafter"
    await node.runtime.stop("two")
    await node.node.co.unpublish(IMAGE, target)
    again = await node.publish()
    assert await node.output("three", again, "cat /data/f") == "kept\nafter"
