"""The whole life of a volume with every call of CSI that changes one, as a program to be traced (`sync_trace`).

    python -m tests.support.nodes.traced_life ROOT FS_TYPE     FS_TYPE is raw for a raw device

The driver's own servicers run in this process; when one has returned, which is before its answer is sent, `answered`
leaves a mark in the trace. The pool stays, with one volume, for a second run.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from crust.blockdriver.node.node_expand import OnlineGrowthRefused
from crust.core import volumes
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, block, caller, mount
from tests.support.nodes.fake_throttle import FakeThrottle
from tests.support.records import pool_layout

MARK = "/answered"
SIZES = {"ext4": 32 * MIB, "xfs": 304 * MIB, "btrfs": 272 * MIB, "raw": 32 * MIB}
KEPT = "kept"

Answer = TypeVar("Answer")


def mark(what: str) -> None:
    """A system call that fails and names `what`."""
    with suppress(OSError):
        os.rmdir(f"{MARK}/{what}")


async def answered(what: str, call: Awaitable[Answer]) -> Answer:
    """Await a call of the driver, and mark its end."""
    answer = await call
    mark(what)
    return answer


class Life:
    """A CO with one driver, one filesystem and a pod's writes."""

    def __init__(self, bench: Bench, fs_type: str) -> None:
        self._bench = bench
        self._raw = fs_type == "raw"
        self._size = SIZES[fs_type]
        self._capability = block() if self._raw else mount(fs_type)

    async def run(self) -> None:
        """All calls, in an order that a kubelet and the sidecars could send."""
        volume_id = await self._create("one")
        other_id = await self._create("two")
        await self._up(volume_id)
        await self._up(other_id)
        self._write(volume_id, b"a pod's bytes")
        await self._grow_in_use(volume_id)
        if self._raw:  # not all pools copy a raw device that is in use
            await self._down(volume_id)
            await self._down(other_id)
        await self._snapshots(volume_id)
        await self._group(volume_id, other_id)
        await self._copy("cloned", volume=volume_id)
        if not self._raw:
            await self._down(volume_id)
            await self._down(other_id)
        limits = self._bench.modify(volume_id, readIOPS="100")
        await answered("ControllerModifyVolume", limits)
        await self._grow(volume_id, 3)
        await self._up(volume_id)
        await self._down(volume_id)
        await self._interrupted(other_id)
        for each in (volume_id, other_id):
            await answered("DeleteVolume", self._bench.delete(each))
        await self._create(KEPT)

    async def again(self) -> None:
        """What a driver that was started again is asked first."""
        volume_id = await self._create(KEPT)
        await self._grow(volume_id, 1)

    async def _create(self, name: str) -> str:
        call = self._bench.create(name, self._capability, size=self._size)
        return (await answered("CreateVolume", call)).volume_id

    async def _up(self, volume_id: str) -> None:
        bench, capability = self._bench, self._capability
        await answered("ControllerPublishVolume", bench.attach(volume_id))
        await answered("NodeStageVolume", bench.stage(volume_id, capability))
        target = bench.target(volume_id)
        await answered("NodePublishVolume", bench.publish(volume_id, target, capability))

    async def _down(self, volume_id: str) -> None:
        bench = self._bench
        await answered("NodeUnpublishVolume", bench.unpublish(volume_id, bench.target(volume_id)))
        await answered("NodeUnstageVolume", bench.unstage(volume_id))
        await answered("ControllerUnpublishVolume", bench.release(volume_id))

    async def _grow(self, volume_id: str, more: int) -> int:
        size = self._size + 16 * MIB * more
        await answered("ControllerExpandVolume", self._bench.grow(volume_id, size))
        return size

    async def _grow_in_use(self, volume_id: str) -> None:
        size = await self._grow(volume_id, 2)
        call = self._bench.expand(volume_id, self._bench.target(volume_id), size)
        with suppress(
            OnlineGrowthRefused
        ):  # a kernel that lets nobody here resize: it is on record then
            await call
        mark("NodeExpandVolume")

    async def _snapshots(self, volume_id: str) -> None:
        co = self._bench.co
        snapshot = await answered("CreateSnapshot", co.snapshot(volume_id))
        await self._copy("restored", snapshot=snapshot.snapshot_id)
        await answered("DeleteSnapshot", co.delete_snapshot(snapshot.snapshot_id))

    async def _group(self, *volume_ids: str) -> None:
        groups = self._bench.driver.snapshot_calls
        request = csi_pb2.CreateVolumeGroupSnapshotRequest(name="g", source_volume_ids=volume_ids)
        call = groups.CreateVolumeGroupSnapshot(request, caller())
        taken = (await answered("CreateVolumeGroupSnapshot", call)).group_snapshot
        drop = csi_pb2.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=taken.group_snapshot_id,
            snapshot_ids=[each.snapshot_id for each in taken.snapshots],
        )
        call_drop = groups.DeleteVolumeGroupSnapshot(drop, caller())
        await answered("DeleteVolumeGroupSnapshot", call_drop)

    async def _copy(self, name: str, **source: Any) -> None:
        call = self._bench.create(name, self._capability, size=0, **source)
        copied = (await answered("CreateVolume from a source", call)).volume_id
        await self._up(copied)
        await self._down(copied)
        await answered("DeleteVolume", self._bench.delete(copied))

    async def _interrupted(self, volume_id: str) -> None:
        """The stage after a mkfs that was interrupted: what it left is cleared, and it is made again."""
        if self._raw:
            return
        stores = self._bench.driver.stores
        os.truncate(self._image(volume_id), 0)
        os.truncate(self._image(volume_id), self._size)
        fd = os.open(self._image(volume_id), os.O_RDWR)
        os.fsync(fd)
        os.close(fd)
        known = stores.content_records.load(volumes.VolumeId(volume_id))
        stores.content_records.save(known.but(state="formatting"))
        await self._up(volume_id)
        await self._down(volume_id)

    def _image(self, volume_id: str) -> str:
        return str(pool_layout.image(self._bench.root / "state", volume_id))

    def _write(self, volume_id: str, data: bytes) -> None:
        target = self._bench.target(volume_id)
        fd = os.open(target if self._raw else f"{target}/file", os.O_CREAT | os.O_WRONLY)
        os.write(fd, data)
        os.fsync(fd)
        os.close(fd)


def main(root: Path, fs_type: str) -> None:
    """A first run, or, where there is a pool, a second one."""
    first = not (root / "state").exists()
    bench = Bench(root, throttle=FakeThrottle())
    mark("start")
    life = Life(bench, fs_type)
    asyncio.run(life.run() if first else life.again())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
