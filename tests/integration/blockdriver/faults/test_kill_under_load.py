"""The driver as a process, killed with -9 again and again under 64 callers: no leak and no lost byte.

`TESTS_STRESS_SEED` makes the choices other ones, `TESTS_STRESS_ROUNDS` makes it long: a round is 200 volumes.
"""

import asyncio
import os
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from crust.host.filesystems import fsfreeze
from crust.host.mounts import mountinfo
from crust.rpc import channel
from tests.support.drivers import pools, remnants
from tests.support.drivers.block_driver import MIB
from tests.support.drivers.killed_driver import KilledDriver, RetryingCo
from tests.support.lives import Life, Volume
from tests.support.records import pool_layout

SEED = int(os.environ.get("TESTS_STRESS_SEED", "1"))
ROUNDS = int(os.environ.get("TESTS_STRESS_ROUNDS", "1"))
CALLERS = 64
VOLUMES = 200
TURNS = 1 if ROUNDS == 1 else 3
ANSWERS_BETWEEN_KILLS = (50, 400)
SLACK_BYTES = 2 * MIB
"""Capacity is reported in mebibytes, and xfs may keep some blocks for its own btrees."""

pytestmark = [pytest.mark.root, pytest.mark.timeout(300 * ROUNDS)]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A directory with an xfs pool in it."""
    with pools.mounted("xfs", tmp_path, tmp_path / "pool", size=32 * 1024 * MIB):
        yield tmp_path


@pytest.fixture
async def driver(root: Path) -> AsyncIterator[KilledDriver]:
    running = KilledDriver(root)
    running.start()
    try:
        yield running
    finally:
        running.kill()
        remnants.remove(root / "pool", keep=str(root / "pool"))


async def _kill(driver: KilledDriver, chance: random.Random) -> None:
    while True:
        await driver.wait_for(driver.answered + chance.randint(*ANSWERS_BETWEEN_KILLS))
        driver.kill()
        driver.start()
        while chance.random() < 0.3:
            await asyncio.sleep(chance.uniform(0, 1))  # waits for nothing: any moment of its start
            driver.kill()
            driver.start()


async def _live(co: RetryingCo, root: Path, numbers: Iterator[int]) -> list[Volume]:
    """One caller: volume after volume; those that stay."""
    stay = []
    for number in numbers:
        volume = await Life(co, root, SEED, number).run(TURNS)
        if volume is not None:
            stay.append(volume)
    return stay


async def _survivors(driver: KilledDriver, co: RetryingCo) -> list[Volume]:
    numbers = iter(range(ROUNDS * VOLUMES))
    killer = asyncio.create_task(_kill(driver, random.Random(SEED)), name="killer")
    async with asyncio.TaskGroup() as group:
        callers = [
            group.create_task(_live(co, driver.root, numbers), name=f"caller {number}")
            for number in range(CALLERS)
        ]
    killer.cancel()
    await asyncio.wait([killer])
    driver.kill()  # the last time, whatever the killer was at
    driver.start()
    return [volume for caller in callers for volume in caller.result()]


def _check_nothing_left(root: Path, survivors: list[Volume]) -> None:
    ids = {volume.volume_id for volume in survivors}
    state = root / "pool" / "state"
    assert [each.target for each in mountinfo.below(str(root))] == [str(root / "pool")]
    assert remnants.devices(root / "pool") == []
    assert pool_layout.files(state) == pool_layout.files_of(state, ids)
    assert [path for path in root.glob("run/*/*/*") if path.suffix == ".json"] == []


async def _capacity(root: Path, co: RetryingCo) -> int:
    """The available capacity, once xfs has freed all blocks of deleted files: a freeze waits for that."""
    pool = str(root / "pool")
    fsfreeze.Freeze(pool).thaw()
    return await co.capacity()


async def test_driver_killed_under_load_loses_nothing(driver: KilledDriver, root: Path) -> None:
    async with channel.connect(driver.socket) as connected:
        co = RetryingCo(driver, connected)
        before = await _capacity(root, co)
        survivors = await _survivors(driver, co)
        for volume in survivors:
            await Life(co, root, SEED, 0).verify(volume)
        _check_nothing_left(root, survivors)
        for volume in survivors:
            if volume.fs_type == "ext4":
                image = pool_layout.image(root / "pool" / "state", volume.volume_id)
                subprocess.run(["e2fsck", "-fn", str(image)], check=True, capture_output=True)  # noqa: ASYNC221
        provisioned = sum(volume.size_bytes for volume in survivors)
        assert (
            before - provisioned - SLACK_BYTES
            <= await _capacity(root, co)
            <= before - provisioned + MIB
        )
        for volume in survivors:
            await Life(co, root, SEED, 0).delete(volume)
        _check_nothing_left(root, [])
        assert before - SLACK_BYTES <= await _capacity(root, co) <= before
