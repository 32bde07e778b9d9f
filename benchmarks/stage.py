"""The cost of stage and publish against the programs losetup, blkid and mount doing the same.

A round stages and publishes a volume, then unpublishes and unstages it: with the programs, as a driver that runs
programs does; by a driver in this process, which is the same work in the same place; and by a driver behind its
socket, as a kubelet calls it, with two gRPC calls each way. Each round starts with another one. The programs use the
image of the first driver's volume. All use direct I/O.
"""

import asyncio
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

from benchmarks import figures, node
from crust.blockdriver.driver import Driver, build
from crust.blockdriver.engines import files
from crust.rpc.call import Call
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.kubelet import MOUNT, Kubelet
from tests.support.records import pool_layout

NAME = "stage"
ROUNDS = 300
WARM_UP = 20
SIZE_BYTES = 256 << 20
LIMIT = 0.5

_CALL = Call("/benchmarks/call")
"""Of a caller without a deadline."""
UP, DOWN = "stage and publish", "unpublish and unstage"
PROGRAMS = "the programs"
DRIVER = "the driver"
SERVED = "the driver, with two calls over its socket"

Times = figures.Collector[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds by operation and implementation."""

    samples: dict[tuple[str, str], figures.Samples]

    def report(self) -> figures.Report:
        """The figures against the two goals."""
        return figures.Report(
            name=NAME,
            ways=(PROGRAMS, DRIVER, SERVED),
            title="Stage and publish a volume, unpublish and unstage it",
            method=(
                f"ext4, {SIZE_BYTES >> 20} MiB, formatted before; {ROUNDS} rounds of each. The programs: losetup, "
                "blkid and mount, then umount and losetup, each started in a thread."
            ),
            rows=tuple(
                figures.Row(
                    f"{step}: {name}",
                    samples,
                    "" if name == PROGRAMS else f"{step}: {PROGRAMS}",
                    is_other=name == PROGRAMS,
                )
                for (step, name), samples in self.samples.items()
            ),
            goals=tuple(
                figures.at_most(
                    f"{step}: at most half of what the programs take",
                    self._ratio(step),
                    LIMIT,
                    "times",
                )
                for step in (UP, DOWN)
            ),
            if_missed="a stage and a publish are calls of a pod's start, which takes seconds",
            meaning=(
                "For a volume that is formatted and clean the driver starts no program: it calls the kernel and "
                "reads the superblock itself. It also writes its node state. A call over a socket costs about as "
                "much as the start of a program."
            ),
        )

    def _ratio(self, step: str) -> float:
        return self.samples[step, DRIVER].median / self.samples[step, PROGRAMS].median


class _Way(Protocol):
    """One way to stage and publish a volume, and to undo both."""

    async def up(self) -> None: ...

    async def down(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Served:
    """A driver behind its socket."""

    co: Kubelet
    volume: csi_pb2.Volume

    async def up(self) -> None:
        await self.co.stage(self.volume)
        await self.co.publish(self.volume, self.co.target("bench"), defer=False)

    async def down(self) -> None:
        await self.co.unpublish(self.volume, self.co.target("bench"))
        await self.co.unstage(self.volume)


@dataclass(frozen=True, slots=True)
class InProcess:
    """The servicers of a driver in this process, with a kubelet's requests."""

    driver: Driver
    root: Path
    volume_id: str

    @classmethod
    async def on(cls, root: Path, run: Path) -> Self:
        """A driver with a pool, and a kubelet's directories, below `root`, and no volume yet; `run` is in memory."""
        for name in ("pool", "staging", "pod"):
            (root / name).mkdir(mode=0o700)
        driver = build(
            engine=files.engine(str(root / "pool"), create=True),
            run_dir=str(run / "inside"),
            node_id="bench",
            target_roots=(str(root),),
        )
        await asyncio.to_thread(driver.open)
        return cls(driver, root, "")

    async def created(self, name: str, size_bytes: int) -> Self:
        """The same with a new volume."""
        request = csi_pb2.CreateVolumeRequest(
            name=name,
            capacity_range=csi_pb2.CapacityRange(required_bytes=size_bytes),
            volume_capabilities=[MOUNT],
        )
        made = await self.driver.controller.CreateVolume(request, _CALL)
        return replace(self, volume_id=made.volume.volume_id)

    @property
    def image(self) -> Path:
        """The file of the volume's bytes."""
        return pool_layout.image(self.root / "pool", self.volume_id)

    async def up(self) -> None:
        """Stage and publish."""
        await self.stage()
        publish = csi_pb2.NodePublishVolumeRequest(
            volume_id=self.volume_id,
            staging_target_path=self._staging,
            target_path=self._target,
            volume_capability=MOUNT,
        )
        await self.driver.node.NodePublishVolume(publish, _CALL)

    async def down(self) -> None:
        """Unpublish and unstage."""
        unpublish = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=self.volume_id, target_path=self._target
        )
        await self.driver.node.NodeUnpublishVolume(unpublish, _CALL)
        await self.unstage()

    async def stage(self) -> None:
        """Stage the volume."""
        stage = csi_pb2.NodeStageVolumeRequest(
            volume_id=self.volume_id, staging_target_path=self._staging, volume_capability=MOUNT
        )
        await self.driver.node.NodeStageVolume(stage, _CALL)

    async def unstage(self) -> None:
        """Unstage the volume."""
        unstage = csi_pb2.NodeUnstageVolumeRequest(
            volume_id=self.volume_id, staging_target_path=self._staging
        )
        await self.driver.node.NodeUnstageVolume(unstage, _CALL)

    async def delete(self) -> None:
        """Delete the volume."""
        request = csi_pb2.DeleteVolumeRequest(volume_id=self.volume_id)
        await self.driver.controller.DeleteVolume(request, _CALL)

    @property
    def _staging(self) -> str:
        return str(self.root / "staging")

    @property
    def _target(self) -> str:
        return str(self.root / "pod" / "mount")


@dataclass(frozen=True, slots=True)
class _Programs:
    """losetup, blkid, mount and umount, and creating and removing the target: one thread per call, as in the driver.

    Not asyncio's subprocesses: starting a program through the event loop costs more, which would favour the driver.
    """

    image: Path
    target: Path

    async def up(self) -> None:
        device = await asyncio.to_thread(self._stage)
        await asyncio.to_thread(self._publish, device)

    async def down(self) -> None:
        device = await asyncio.to_thread(self._unpublish)
        await asyncio.to_thread(output, "losetup", "--detach", device)

    def _stage(self) -> str:
        device = output("losetup", "--find", "--show", "--direct-io=on", str(self.image))
        output("blkid", "-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device)
        return device

    def _publish(self, device: str) -> None:
        self.target.mkdir()
        output("mount", "-t", "ext4", device, str(self.target))

    def _unpublish(self) -> str:
        # A driver would know the device, so this must not cost a program.
        device = f"/dev/loop{os.minor(self.target.stat().st_dev)}"
        output("umount", str(self.target))
        self.target.rmdir()
        return device


async def measure() -> Result:
    """Measure with a driver in this process and one in a process of its own."""
    with node.directories() as paths:
        async with node.driver(paths) as co:
            served = _Served(co, await co.create("bench", SIZE_BYTES))
            inside = paths.base / "inside"
            inside.mkdir()
            driver = await (await InProcess.on(inside, paths.crust_run)).created(
                "bench", SIZE_BYTES
            )
            ways: dict[str, _Way] = {DRIVER: driver, SERVED: served}
            await _rounds(ways, WARM_UP)  # formats both volumes
            ways[PROGRAMS] = _Programs(driver.image, paths.base / "by-programs")
            await _rounds(ways, WARM_UP)
            times = await _rounds(ways, ROUNDS)
            await driver.delete()
            await co.delete(served.volume)
    samples = times.samples()
    # In the order of the page.
    order = [(step, name) for step in (UP, DOWN) for name in (PROGRAMS, DRIVER, SERVED)]
    return Result({key: samples[key] for key in order})


async def _rounds(ways: dict[str, _Way], count: int) -> Times:
    times, order = Times(), tuple(ways.items())
    for number in range(count):
        first = number % len(order)
        for name, way in order[first:] + order[:first]:
            await times.timed((UP, name), way.up())
            await times.timed((DOWN, name), way.down())
    return times


def output(*command: str) -> str:
    """Run a program, and its standard output without the last newline."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
