"""The block lists of several callers at once."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.host.extents import Extent
from crust.host.process import workers
from crust.rpc.call import Call
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers import driver_state


class Reading(Call):
    """A call that says when it reads blocks: after it has read the snapshot."""

    def __init__(self) -> None:
        super().__init__("/csi.v1.SnapshotMetadata/GetMetadataAllocated")
        self.reads, self.reads_blocks = 0, asyncio.Event()

    def time_remaining(self) -> float | None:
        self.reads += 1
        if self.reads == 2:
            self.reads_blocks.set()
        return super().time_remaining()


async def test_block_lists_read_at_once_keep_each_callers_max_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two callers that waited for the same read shared the next one, with the messages of either."""
    monkeypatch.setattr(workers, "TURN_S", 0)  # as if the first read hung
    state = driver_state.opened(tmp_path)
    volume = await state.controller.provisioner.create(driver_state.create())
    taken = await state.controller.snapshots.create("a", volume.volume_id)
    snapshot_id = taken.snapshots[0].snapshot_id
    is_read, goes_on = threading.Event(), threading.Event()

    def allocated(*_: Any) -> list[Extent]:
        is_read.set()
        assert goes_on.wait(20)
        return [Extent(number * 8192, 4096) for number in range(3)]

    async def lengths(max_results: int, call: Call) -> list[int]:
        request = csi_pb2.GetMetadataAllocatedRequest(
            snapshot_id=snapshot_id, max_results=max_results
        )
        messages = state.controller.GetMetadataAllocated(request, call)
        return [len(message.block_metadata) async for message in messages]

    monkeypatch.setattr(state.stores.provisioning, "allocated", allocated)
    calls = [Reading() for _ in range(3)]
    first = asyncio.create_task(lengths(0, calls[0]))
    assert await asyncio.to_thread(is_read.wait, 20)
    others = [asyncio.create_task(lengths(count, calls[count])) for count in (1, 2)]
    for call in calls:
        await call.reads_blocks.wait()
    goes_on.set()
    assert await asyncio.gather(first, *others) == [[3], [1, 1, 1], [2, 1]]
