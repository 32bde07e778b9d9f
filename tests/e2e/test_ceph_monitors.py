"""A Ceph cluster of three monitors loses the first of them: guests go on, and new ones open their images."""

import signal
from collections.abc import Iterator

import pytest

from crust.ceph.failures import CephMonitorsUnreachable
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import CephCluster
from examples.kata.runtime.client import RuntimeRefused
from tests.support.ceph.image_node import IMAGE, ImageNode, Storage, image_node

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    with ceph_cluster.running(tmp_path_factory.mktemp("ceph") / "c", monitors=3) as cluster:
        yield cluster


async def started(node: ImageNode, sandbox: str, target: str) -> str:
    """What a new sandbox reads, started again as a kubelet does when it meets the election of a leader."""
    while True:
        try:
            return await node.output(sandbox, target, "cat /data/f")
        except RuntimeRefused as refused:
            if refused.error_name != CephMonitorsUnreachable.__name__:
                raise


async def test_dead_monitor_stops_neither_a_guest_nor_the_next_one(
    three: CephCluster, guest_image: object, acceleration: object
) -> None:
    async with image_node("node-a", Storage.make(three)) as node:
        target = await node.publish()
        assert await node.output("one", target, "echo kept > /data/f; sync; cat /data/f") == "kept"
        three.daemons.pop("mon.a").end(signal.SIGKILL)
        written = await node.output("one", target, "echo after >> /data/f; sync; wc -l < /data/f")
        assert written == "2"
        await node.runtime.stop("one")
        assert await started(node, "two", target) == "kept\nafter"
        await node.runtime.stop("two")
        await node.node.co.unpublish(IMAGE, target)
        again = await node.publish()
        assert await started(node, "three", again) == "kept\nafter"
