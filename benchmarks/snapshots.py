"""Whether a snapshot or clone of 2 GiB takes longer than one of 100 MiB, on filesystems that share blocks.

One driver has its pool on a new xfs, another on a new btrfs, each in a file. Each pool has two raw volumes of equal
size: one holds 100 MiB, the other 2 GiB, synced. A round takes a snapshot and a clone of each volume, in turn, and
deletes them. The volumes are not attached, so no filesystem is frozen.
"""

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import figures, node
from crust.host.block import loop
from crust.host.mounts import mount_api
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.kata.demo.node import NodePaths
from tests.support.records import pool_layout

NAME = "snapshots"
ROUNDS = 60
WARM_UP = 5
MIB = 1 << 20
LITTLE, MUCH = 100 * MIB, 2048 * MIB
SIZE_BYTES = 4096 * MIB
POOL_BYTES = 32 * 1024 * MIB
TIMEOUT_S = 120.0
SAME = 1.5
SNAPSHOT, CLONE = "snapshot", "clone"
BLOCK = csi_pb2.VolumeCapability(
    block=csi_pb2.VolumeCapability.BlockVolume(),
    access_mode=csi_pb2.VolumeCapability.AccessMode(
        mode=csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
    ),
)
FILESYSTEMS = {"xfs": ("mkfs.xfs", "-q", "-m", "reflink=1"), "btrfs": ("mkfs.btrfs", "-q")}

Key = tuple[str, str, int]
Times = figures.Collector[Key]


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds by filesystem, operation and amount of data."""

    samples: dict[Key, figures.Samples]

    def report(self) -> figures.Report:
        """The figures against the goals."""
        return figures.Report(
            name=NAME,
            ways=(_shown(LITTLE), _shown(MUCH)),
            title="Snapshots and clones",
            method=f"{ROUNDS} rounds of each; raw volumes of {SIZE_BYTES >> 30} GiB that are not attached.",
            rows=tuple(
                figures.Row(
                    _label(key), samples, "" if key[2] == LITTLE else _label((*key[:2], LITTLE))
                )
                for key, samples in sorted(self.samples.items())
            ),
            goals=tuple(
                figures.at_most(
                    f"{copy} on {fs_type}: {_shown(MUCH)} at most {SAME} times {_shown(LITTLE)}",
                    self.samples[fs_type, copy, MUCH].median
                    / self.samples[fs_type, copy, LITTLE].median,
                    SAME,
                    "times",
                )
                for fs_type in FILESYSTEMS
                for copy in (SNAPSHOT, CLONE)
            ),
            if_missed="a copy takes the longer the more data there is; the pod waits while its filesystem is frozen",
            meaning=("No block is copied; on ext4 pools the time of a copy grows with its data."),
        )


@dataclass(frozen=True, slots=True)
class _Pool:
    """A driver on a filesystem, and its two volumes by the amount of their data."""

    fs_type: str
    controller: "csi_pb2_grpc.ControllerAsyncStub"
    sources: dict[int, str]


async def measure() -> Result:
    """Measure with a pool on each filesystem, one after the other."""
    times = Times()
    for fs_type in FILESYSTEMS:
        with node.directories() as paths, filesystem(paths, fs_type):
            async with _pool(paths, fs_type) as pool:
                await _rounds(pool, WARM_UP, Times())
                await _rounds(pool, ROUNDS, times)
    return Result(times.samples())


@contextlib.contextmanager
def filesystem(paths: NodePaths, fs_type: str) -> Iterator[None]:
    """A new filesystem in a file, mounted where the driver has its pool."""
    backing, pool = paths.base / "backing", paths.base / "pool"
    with backing.open("wb") as file:
        file.truncate(POOL_BYTES)
    subprocess.run([*FILESYSTEMS[fs_type], str(backing)], check=True, capture_output=True)
    device = loop.attach(str(backing))
    pool.mkdir()
    try:
        mount_api.mount_device(device.path, str(pool), fs_type)
        yield
    finally:
        node.clean_up(paths.kubelet, pool)
        mount_api.unmount(str(pool))
        loop.detach(device)


@contextlib.asynccontextmanager
async def _pool(paths: NodePaths, fs_type: str) -> AsyncIterator[_Pool]:
    async with contextlib.AsyncExitStack() as stack:
        process = await node.start(paths, "driver")
        stack.push_async_callback(process.stop)
        await node.wait_until_serving(paths.driver_socket)
        connected = await stack.enter_async_context(channel.connect(paths.driver_socket))
        controller = csi_pb2_grpc.ControllerStub(connected)
        sources = {}
        for data_bytes in (LITTLE, MUCH):
            made = await controller.CreateVolume(_volume(f"of-{data_bytes}"), timeout=TIMEOUT_S)
            sources[data_bytes] = made.volume.volume_id
            _fill(pool_layout.image(paths.base / "pool", made.volume.volume_id), data_bytes)
        yield _Pool(fs_type, controller, sources)


def _fill(image: Path, data_bytes: int) -> None:
    chunk = os.urandom(MIB)
    with image.open("r+b") as file:
        for _ in range(data_bytes // MIB):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


async def _rounds(pool: _Pool, count: int, times: Times) -> None:
    for number in range(count):
        for data_bytes in (LITTLE, MUCH) if number % 2 else (MUCH, LITTLE):
            await _snapshot(pool, data_bytes, f"s-{number}", times)
            await _clone(pool, data_bytes, f"c-{number}", times)


async def _snapshot(pool: _Pool, data_bytes: int, name: str, times: Times) -> None:
    source = pool.sources[data_bytes]
    wanted = csi_pb2.CreateSnapshotRequest(source_volume_id=source, name=f"{name}-{data_bytes}")
    call = pool.controller.CreateSnapshot(wanted, timeout=TIMEOUT_S)
    made = await times.timed((pool.fs_type, SNAPSHOT, data_bytes), call)
    delete = csi_pb2.DeleteSnapshotRequest(snapshot_id=made.snapshot.snapshot_id)
    await pool.controller.DeleteSnapshot(delete, timeout=TIMEOUT_S)


async def _clone(pool: _Pool, data_bytes: int, name: str, times: Times) -> None:
    wanted = _volume(f"{name}-{data_bytes}")
    wanted.volume_content_source.volume.volume_id = pool.sources[data_bytes]
    call = pool.controller.CreateVolume(wanted, timeout=TIMEOUT_S)
    made = await times.timed((pool.fs_type, CLONE, data_bytes), call)
    delete = csi_pb2.DeleteVolumeRequest(volume_id=made.volume.volume_id)
    await pool.controller.DeleteVolume(delete, timeout=TIMEOUT_S)


def _volume(name: str) -> csi_pb2.CreateVolumeRequest:
    return csi_pb2.CreateVolumeRequest(
        name=name,
        capacity_range=csi_pb2.CapacityRange(required_bytes=SIZE_BYTES),
        volume_capabilities=[BLOCK],
    )


def _shown(data_bytes: int) -> str:
    return f"{data_bytes >> 20} MiB" if data_bytes < 1 << 30 else f"{data_bytes >> 30} GiB"


def _label(key: Key) -> str:
    fs_type, copy, data_bytes = key
    return f"{fs_type}: {copy} of {_shown(data_bytes)}"
