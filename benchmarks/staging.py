"""What staging and publishing a volume costs beside the programs losetup, blkid and mount doing the same.

The volume is formatted once. A round stages and publishes it through the driver's socket, takes it back, and then
attaches, probes and mounts the very same image with the programs, the way a driver without system calls does it;
every other round begins with the programs. Direct I/O on both sides. The driver is a process of its own, so its
figures have two gRPC calls each in them.
"""

import os
import subprocess
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import figures, node
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.kubelet import Kubelet

NAME = "stage"
ROUNDS = 300
WARM_UP = 20
SIZE_BYTES = 256 << 20
LIMIT = 0.5
UP, DOWN = "stage and publish", "unpublish and unstage"
DRIVER, PROGRAMS = "the driver, two calls over its socket", "the programs"


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds by what was done and by whom."""

    samples: dict[tuple[str, str], figures.Samples]

    def report(self) -> figures.Report:
        """The figures against the two goals."""
        return figures.Report(
            name=NAME,
            title="A volume's way onto the host and back",
            method=(
                f"ext4, {SIZE_BYTES >> 20} MiB, formatted before; {ROUNDS} rounds of both. The programs: losetup, "
                "blkid and mount on the way up, umount and losetup on the way down."
            ),
            rows=tuple(
                figures.Row(f"{what}: {who}", each, f"{what}: {PROGRAMS}" if who == DRIVER else "")
                for (what, who), each in self.samples.items()
            ),
            goals=tuple(
                figures.at_most(
                    f"{what}: at most half of what the programs take (medians)",
                    self._ratio(what),
                    LIMIT,
                    "times",
                )
                for what in (UP, DOWN)
            ),
            meaning=(
                "The driver starts no program for a volume that is formatted and clean: it asks the kernel itself, "
                "reads the superblock itself, and besides keeps the ledger that the programs do not have."
            ),
        )

    def _ratio(self, what: str) -> float:
        return self.samples[what, DRIVER].median / self.samples[what, PROGRAMS].median


@dataclass(slots=True)
class _Taken:
    values: dict[tuple[str, str], list[float]] = field(
        default_factory=lambda: {
            (what, who): [] for what in (UP, DOWN) for who in (PROGRAMS, DRIVER)
        }
    )

    async def add(self, what: str, who: str, work: Awaitable[None]) -> None:
        """Do it, and note how long it took."""
        started_ns = time.perf_counter_ns()
        await work
        self.values[what, who].append((time.perf_counter_ns() - started_ns) / 1e6)


async def measure() -> Result:
    """Run it against a driver of its own."""
    with node.directories() as places:
        async with node.driver(places) as co:
            volume = await co.create("bench", SIZE_BYTES)
            await _up(co, volume)
            await _down(co, volume)
            image = places.base / "pool" / "images" / f"{volume.volume_id}.img"
            target = places.base / "by-programs"
            target.mkdir()
            await _rounds(co, volume, image, target, WARM_UP)
            taken = await _rounds(co, volume, image, target, ROUNDS)
            await co.delete(volume)
    return Result({key: figures.Samples.of("ms", each) for key, each in taken.values.items()})


async def _rounds(
    co: Kubelet, volume: csi_pb2.Volume, image: Path, target: Path, count: int
) -> _Taken:
    taken = _Taken()
    for number in range(count):
        for who in (DRIVER, PROGRAMS) if number % 2 else (PROGRAMS, DRIVER):
            if who == DRIVER:
                await taken.add(UP, who, _up(co, volume))
                await taken.add(DOWN, who, _down(co, volume))
            else:
                await taken.add(UP, who, _up_by_programs(image, target))
                await taken.add(DOWN, who, _down_by_programs(image, target))
    return taken


async def _up(co: Kubelet, volume: csi_pb2.Volume) -> None:
    await co.stage(volume)
    await co.publish(volume, co.target("bench"), defer=False)


async def _down(co: Kubelet, volume: csi_pb2.Volume) -> None:
    await co.unpublish(volume, co.target("bench"))
    await co.unstage(volume)


async def _up_by_programs(image: Path, target: Path) -> None:
    # Not asyncio's: to start a program through the event loop costs more, and would flatter the driver.
    device = _output("losetup", "--find", "--show", "--direct-io=on", str(image))
    _output("blkid", "-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device)
    _output("mount", "-t", "ext4", device, str(target))


async def _down_by_programs(image: Path, target: Path) -> None:
    device = _device_of(target)
    _output("umount", str(target))
    _output("losetup", "--detach", device)


def _device_of(target: Path) -> str:
    """What a driver remembers: read here without a program."""
    return f"/dev/loop{os.minor(target.stat().st_dev)}"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
