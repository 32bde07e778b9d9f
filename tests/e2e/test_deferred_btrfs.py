"""A deferred btrfs volume: mounted and expanded in a guest, then read on the host."""

import hashlib

import pytest

from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.kubelet import capability
from tests.support.nodes.whole_node import MIB, whole_node

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]

BYTES = csi_pb2.VolumeUsage.BYTES
SIZE_BYTES = 320 * MIB
WRITE = "dd if=/dev/urandom of=/data/f bs=1M count=8 2>/dev/null; sync; md5sum < /data/f"


async def test_btrfs_is_deferred_expanded_online_and_read_by_the_host(
    guest_image: object, acceleration: object
) -> None:
    wanted = capability("btrfs")
    async with whole_node() as node:
        volume = await node.volume(size_bytes=SIZE_BYTES, capability=wanted)
        target = await node.publish(volume, capability=wanted)
        assert "btrfs" in await node.output("one", target, "grep ' /data ' /proc/mounts")
        before = await node.kubelet.stats(volume, target)
        assert await node.kubelet.expand(volume, target, 2 * SIZE_BYTES) == 2 * SIZE_BYTES
        after = await node.kubelet.stats(volume, target)
        assert after[BYTES].total - before[BYTES].total == SIZE_BYTES
        summed = await node.output("one", target, WRITE)
        await node.runtime.stop("one")
        await node.kubelet.unpublish(volume, target)
        on_host = await node.publish(volume, capability=wanted, defer=False)
        assert hashlib.md5((on_host / "f").read_bytes()).hexdigest() == summed.split()[0]
        await node.tidy()
