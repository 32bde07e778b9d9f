"""The cost of the first stage of a new volume, which makes its filesystem, against mkfs alone.

Each round creates a volume, stages it for the first time, which is measured, and removes it; and runs mkfs with the
same options on a sparse file of the same size at a loop device. Rounds begin with one and the other in turn.
"""

import asyncio
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import figures, node
from benchmarks.stage import InProcess, output
from crust.host.block import loop
from crust.host.files import sparse

NAME = "first-stage"
ROUNDS = 200
WARM_UP = 10
SIZE_BYTES = 256 << 20
LIMIT = 1.5
MKFS, STAGE = "mkfs.ext4 alone", "the first stage of a new volume"
_MKFS = (
    *("mkfs.ext4", "-q", "-m", "0", "-b", "4096", "-I", "256"),
    *("-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"),
)

Times = figures.Collector[str]


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds of each."""

    samples: dict[str, figures.Samples]

    def report(self) -> figures.Report:
        """The figures against the goal."""
        ratio = self.samples[STAGE].median / self.samples[MKFS].median
        return figures.Report(
            name=NAME,
            title="The first stage of a new volume, which makes its filesystem",
            method=(
                f"ext4, {SIZE_BYTES >> 20} MiB, {ROUNDS} rounds of each; mkfs.ext4 with the driver's options, on "
                "a loop device of a new sparse file."
            ),
            rows=(
                figures.Row(MKFS, self.samples[MKFS], is_other=True),
                figures.Row(STAGE, self.samples[STAGE], MKFS),
            ),
            goals=(
                figures.at_most(
                    "the first stage: at most 1.5 times mkfs alone", ratio, LIMIT, "times"
                ),
            ),
            if_missed="the first pod of a volume waits so much longer, once",
            meaning=(
                "Beside mkfs a first stage attaches the device, looks for data on it, and writes the content record "
                "durably before mkfs and after it."
            ),
        )


async def measure() -> Result:
    """Measure with a driver in this process."""
    with node.directories() as paths:
        inside = paths.base / "inside"
        inside.mkdir()
        driver = await InProcess.on(inside, paths.crust_run)
        names = (f"first-{number}" for number in itertools.count())
        await _rounds(driver, names, WARM_UP)
        times = await _rounds(driver, names, ROUNDS)
    samples = times.samples()
    return Result({step: samples[step] for step in (MKFS, STAGE)})


async def _rounds(driver: InProcess, names: Iterator[str], count: int) -> Times:
    times = Times()
    for number in range(count):
        if number % 2:
            await _mkfs(driver.root, times)
            await _stage(driver, next(names), times)
        else:
            await _stage(driver, next(names), times)
            await _mkfs(driver.root, times)
    return times


async def _stage(driver: InProcess, name: str, times: Times) -> None:
    new = await driver.created(name, SIZE_BYTES)
    await times.timed(STAGE, new.stage())
    await new.unstage()
    await new.delete()


async def _mkfs(directory: Path, times: Times) -> None:
    image = str(directory / "mkfs.img")
    sparse.create(image, SIZE_BYTES)
    device = loop.attach(image)
    try:
        await times.timed(MKFS, asyncio.to_thread(output, *_MKFS, device.path))
    finally:
        loop.detach(device)
        os.unlink(image)
