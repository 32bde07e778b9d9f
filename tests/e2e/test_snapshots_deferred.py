"""Snapshots of volumes that a guest writes, through CSI, driver, proxy, handler and guest.

Restored volumes are mounted and read on the host.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import Co
from tests.support.nodes.whole_node import WholeNode
from tests.support.runtimes.guest_writer import writing

pytestmark = pytest.mark.vm

IN_ORDER = """
i=0
while :; do i=$((i+1)); echo $i >> /one/log; sync; echo $i >> /two/log; sync; echo $i; done
"""


@asynccontextmanager
async def grouped(
    fresh_node: WholeNode, *of: csi_pb2.Volume
) -> AsyncIterator[csi_pb2.VolumeGroupSnapshot]:
    """A group snapshot, taken as external-snapshotter takes it; removed when the block is left."""
    async with channel.connect(fresh_node.daemons.paths.csi_socket) as to_proxy:
        co = Co(to_proxy, 100)
        group = await co.group(*(volume.volume_id for volume in of))
        yield group
        await co.delete_group(group)


def checked(image: Path) -> str:
    """The output of e2fsck for a filesystem that needs no journal replay; raises if it is not clean."""
    header = subprocess.run(["dumpe2fs", "-h", image], check=True, capture_output=True, text=True)
    assert "needs_recovery" not in header.stdout
    return subprocess.run(
        ["e2fsck", "-fn", image], check=True, capture_output=True, text=True
    ).stdout


async def written(fresh_node: WholeNode, snapshot_id: str) -> list[int]:
    """The numbers in the log of a snapshot, restored and published on the host."""
    restored = await fresh_node.volume(snapshot_id=snapshot_id)
    at = await fresh_node.publish(restored, defer=False)
    return [int(line) for line in (at / "log").read_text().splitlines()]


async def test_group_snapshot_keeps_write_order_across_volumes(fresh_node: WholeNode) -> None:
    one, two = await fresh_node.volume(), await fresh_node.volume()
    targets = {"/one": await fresh_node.publish(one), "/two": await fresh_node.publish(two)}
    async with writing(fresh_node, IN_ORDER, targets) as writer:
        rounds = writer.rounds
        async with grouped(fresh_node, one, two) as group:
            await writer.next_round()
            ids = {snapshot.source_volume_id: snapshot.snapshot_id for snapshot in group.snapshots}
            for snapshot_id in ids.values():
                (image,) = (fresh_node.daemons.paths.base / "pool").rglob(f"{snapshot_id}.snap")
                await asyncio.to_thread(checked, image)
            first, second = [
                await written(fresh_node, ids[volume.volume_id]) for volume in (one, two)
            ]
    assert first == list(range(1, len(first) + 1))
    assert first[: len(second)] == second
    assert rounds <= len(second) <= len(first) <= len(second) + 1
