"""kill -9 or a full disk before every system call of a volume's life, and kill -9 under load: a retry ends it."""

import asyncio
import os
import random
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.controller.class_parameters import POOL
from crust.blockdriver.host import fsfreeze
from crust.core import errors, volumes
from crust.host.block import loop, loopctl
from crust.host.mounts import mountinfo
from crust.rpc import channel
from tests.integration.blockdriver.conftest import benches_on
from tests.support.drivers import pools, remnants
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.drivers.killed_driver import KilledDriver, RetryingCo
from tests.support.faults.crashes import crash_points, failure_points
from tests.support.lives import Life, Volume
from tests.support.records import pool_layout

pytestmark = pytest.mark.root

on_disk = benches_on("xfs", "ext4", size=512 * MIB)
SIZE = 64 * MIB


async def bring_up(bench: Bench, name: str, *, deferred: bool = False, thick: bool = False) -> str:
    kind = {"crust.dev/provisioning": "thick"} if thick else {}
    volume = await bench.create(name, parameters=kind)
    await bench.up(volume.volume_id, bench.target(name), deferred=deferred)
    return volume.volume_id


async def take_down(bench: Bench, name: str) -> None:
    volume_id = bench.ids.volume_id(name)
    await bench.down(volume_id, bench.target(name))
    await bench.delete(volume_id)


def check_nothing_left(bench: Bench) -> None:
    assert mountinfo.below(str(bench.root)) == ()
    assert remnants.devices(bench.root) == []
    assert pool_layout.files(bench.root / "state") == set()
    assert list(bench.root.joinpath("run").rglob("*.json")) == []


def killed_in(
    bench: Bench, reap: Callable[[], None], act: Callable[[int], Coroutine[Any, Any, None]]
) -> Iterator[int]:
    """The calls before which `act(number)` is killed, in turn; after each the driver has started again."""
    for number in crash_points(lambda _: None, lambda number: asyncio.run(act(number))):
        reap()
        bench.restart()
        yield number
    bench.restart()


@pytest.mark.parametrize(
    ("deferred", "thick"),
    [(False, False), (True, False), (True, True)],
    ids=["host", "deferred", "thick"],
)
def test_driver_killed_during_create_to_publish_is_finished_by_retry(
    bench: Bench, reap: Callable[[], None], *, deferred: bool, thick: bool
) -> None:
    async def up(number: int) -> None:
        volume_id = await bring_up(bench, f"v{number}", deferred=deferred, thick=thick)
        (device,) = loop.find(str(bench.image(volume_id)))
        assert loopctl.frees_blocks(device.number) != thick
        if thick:
            status = bench.image(volume_id).stat()
            assert status.st_blocks * 512 >= status.st_size

    last = 0
    for number in killed_in(bench, reap, up):
        asyncio.run(up(number))
        asyncio.run(take_down(bench, f"v{number}"))
        check_nothing_left(bench)
        last = number + 1
    asyncio.run(take_down(bench, f"v{last}"))
    check_nothing_left(bench)
    assert last > 35


def test_driver_killed_during_unpublish_to_delete_is_finished_by_retry(
    bench: Bench, reap: Callable[[], None]
) -> None:
    async def down(_: int) -> None:
        await take_down(bench, "v")

    asyncio.run(bring_up(bench, "v"))
    last = 0
    for last in killed_in(bench, reap, down):
        asyncio.run(down(last))
        check_nothing_left(bench)
        asyncio.run(bring_up(bench, "v"))
    check_nothing_left(bench)
    assert last > 10


def test_driver_killed_during_restage_keeps_every_byte(
    bench: Bench, reap: Callable[[], None]
) -> None:
    target = Path(bench.target("v"))

    async def up(_: int) -> None:
        await bring_up(bench, "v")

    volume_id = asyncio.run(bring_up(bench, "v"))
    (target / "kept").write_bytes(b"every byte")
    asyncio.run(bench.down(volume_id, str(target)))
    for number in killed_in(bench, reap, up):
        asyncio.run(up(number))
        assert (target / "kept").read_bytes() == b"every byte"
        asyncio.run(bench.down(volume_id, str(target)))
        assert loop.find(str(bench.image(volume_id))) == ()
    asyncio.run(take_down(bench, "v"))


def test_driver_killed_during_expand_is_finished_by_the_retry(
    bench: Bench, reap: Callable[[], None]
) -> None:
    volume_id, target = asyncio.run(bench.published("v", mount("xfs"), size=300 * MIB))

    async def grow(number: int) -> None:
        size = (301 + number) * MIB
        await bench.grow(volume_id, size)
        assert await bench.expand(volume_id, target, size) == size

    for number in killed_in(bench, reap, grow):
        asyncio.run(grow(number))
        stats = asyncio.run(bench.stats(volume_id, target))
        assert stats.usage[0].total > (201 + number) * MIB
    asyncio.run(bench.down(volume_id, target))
    asyncio.run(bench.delete(volume_id))
    check_nothing_left(bench)


@pytest.mark.parametrize("step", ["create", "snapshot"])
def test_killed_thick_create_or_snapshot_reserves_its_bytes_once(
    on_disk: Bench, reap: Callable[[], None], step: str
) -> None:
    """Also while no call repeats it: then its blocks are free again."""
    bench, kind = on_disk, {"crust.dev/provisioning": "thick"}

    def left() -> int:
        fsfreeze.Freeze(str(bench.root)).thaw()  # it waits until blocks of removed files are free
        return asyncio.run(bench.co.capacity(parameters=kind))

    async def create(number: int) -> None:
        await bench.create(f"v{number}", block(), size=SIZE, parameters=kind)

    async def snapshot(number: int) -> None:
        await bench.co.snapshot(bench.ids.volume_id("source"), f"v{number}")

    async def remove(number: int) -> None:
        if step == "create":
            await bench.delete(bench.ids.volume_id(f"v{number}"))
        else:
            await bench.co.delete_snapshot(bench.ids.snapshot_id(f"v{number}"))

    source = asyncio.run(bench.create("source", size=SIZE, parameters=kind)).volume_id
    with bench.image(source).open("r+b") as image:
        image.write(os.urandom(SIZE))
    act = create if step == "create" else snapshot
    before, last = left(), 0
    for number in killed_in(bench, reap, act):
        assert min(abs(before - left()), abs(before - SIZE - left())) <= SLACK_BYTES
        asyncio.run(act(number))
        assert abs(before - SIZE - left()) <= SLACK_BYTES
        asyncio.run(remove(number))
        assert abs(before - left()) <= SLACK_BYTES
        last = number + 1
    assert last > 10
    asyncio.run(remove(last))
    asyncio.run(bench.delete(source))
    check_nothing_left(bench)


def test_driver_killed_during_thick_expand_is_finished_by_retry(
    bench: Bench, reap: Callable[[], None]
) -> None:
    kind = {"crust.dev/provisioning": "thick"}
    volume_id, target = asyncio.run(bench.published("v", block(), parameters=kind))

    async def grow(number: int) -> None:
        await bench.grow(volume_id, (65 + number) * MIB)

    for number in killed_in(bench, reap, grow):
        asyncio.run(grow(number))
        assert bench.image(volume_id).stat().st_blocks * 512 >= (65 + number) * MIB
    asyncio.run(bench.down(volume_id, target))
    asyncio.run(bench.delete(volume_id))
    check_nothing_left(bench)


def test_full_disk_at_any_call_is_error_that_retry_overcomes(bench: Bench) -> None:
    async def lifecycle(number: int) -> None:
        await bring_up(bench, f"v{number}")

    def prepare(number: int) -> None:
        if number:
            asyncio.run(bring_up(bench, f"v{number - 1}"))
            asyncio.run(take_down(bench, f"v{number - 1}"))
            check_nothing_left(bench)
        bench.target(f"v{number}")
        bench.staging(bench.ids.volume_id(f"v{number}"))

    last = 0
    for number, error in failure_points(prepare, lambda n: asyncio.run(lifecycle(n))):
        if not isinstance(error, errors.CrustError):
            raise AssertionError(f"call {number} let a raw error out") from error
        last = number
    asyncio.run(take_down(bench, f"v{last + 1}"))
    check_nothing_left(bench)


def test_raw_stage_after_an_interrupted_format_reads_as_zeros(bench: Bench) -> None:
    """The record says "formatting", and what half a mkfs left must not reach the raw device's user."""
    volume = asyncio.run(bench.create("v"))
    records = bench.driver.stores.content_records
    known = records.load(volumes.VolumeId(volume.volume_id))
    records.save(known.replaced(state="formatting", fs_type="ext4"))
    with bench.image(volume.volume_id).open("r+b") as image:
        image.seek(5000)
        image.write(b"half a filesystem")
    asyncio.run(bench.up(volume.volume_id, bench.target("v"), block()))
    assert Path(bench.target("v")).read_bytes().count(0) == 64 * 1024 * 1024
    asyncio.run(take_down(bench, "v"))


SEED = int(os.environ.get("TESTS_STRESS_SEED", "1"))
ROUNDS = int(os.environ.get("TESTS_STRESS_ROUNDS", "1"))
CALLERS = 64
VOLUMES = 200
TURNS = 1 if ROUNDS == 1 else 3
ANSWERS_BETWEEN_KILLS = (50, 400)
SLACK_BYTES = 2 * MIB
"""Capacity is reported in mebibytes, and xfs may keep some blocks for its own btrees."""


@pytest.fixture(params=[(), ("fast",)], ids=["one pool", "two pools"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KilledDriver]:
    """Each pool is on an xfs of its own."""
    running = KilledDriver(tmp_path, *request.param)
    with ExitStack() as disks:
        for name, home in running.homes.items():
            base = tmp_path / f"disk-{name}"
            base.mkdir()
            disks.enter_context(pools.mounted("xfs", base, home, size=32 * 1024 * MIB))
        running.start()
        try:
            yield running
        finally:
            running.kill()
            for home in running.homes.values():
                remnants.remove(home, keep=str(home))


async def _kill(driver: KilledDriver, chance: random.Random) -> None:
    while True:
        await driver.wait_for(driver.answered + chance.randint(*ANSWERS_BETWEEN_KILLS))
        driver.kill()
        driver.start()
        while chance.random() < 0.3:
            await asyncio.sleep(chance.uniform(0, 1))  # waits for nothing: any moment of its start
            driver.kill()
            driver.start()


async def _live(co: RetryingCo, driver: KilledDriver, numbers: Iterator[int]) -> list[Volume]:
    """One caller: volume after volume; those that stay."""
    stay = []
    for number in numbers:
        volume = await Life(co, driver.root, SEED, number, list(driver.homes)).run(TURNS)
        if volume is not None:
            stay.append(volume)
    return stay


async def _survivors(driver: KilledDriver, co: RetryingCo) -> list[Volume]:
    numbers = iter(range(ROUNDS * VOLUMES))
    killer = asyncio.create_task(_kill(driver, random.Random(SEED)), name="killer")
    async with asyncio.TaskGroup() as group:
        callers = [
            group.create_task(_live(co, driver, numbers), name=f"caller {number}")
            for number in range(CALLERS)
        ]
    killer.cancel()
    await asyncio.wait([killer])
    driver.kill()  # the last time, whatever the killer was at
    driver.start()
    return [volume for caller in callers for volume in caller.result()]


def _check_nothing_left(driver: KilledDriver, survivors: list[Volume]) -> None:
    root = driver.root
    mounted = {mount.target for mount in mountinfo.below(str(root))}
    assert mounted == set(map(str, driver.homes.values()))
    for name, home in driver.homes.items():
        ids = {volume.volume_id for volume in survivors if volume.pool == name}
        assert remnants.devices(home) == []
        assert pool_layout.files(home / "state") == pool_layout.files_of(home / "state", ids)
    assert list(root.joinpath("run").rglob("*.json")) == []


async def _capacity(driver: KilledDriver, co: RetryingCo, pool: str) -> int:
    """The available capacity, once xfs has freed all blocks of deleted files: a freeze waits for that."""
    fsfreeze.Freeze(str(driver.homes[pool])).thaw()
    return await co.capacity(parameters={POOL: pool})


@pytest.mark.timeout(900 * ROUNDS)
async def test_driver_killed_under_load_loses_nothing(driver: KilledDriver) -> None:
    root = driver.root
    async with channel.connect(driver.socket) as connected:
        co = RetryingCo(driver, connected)
        before = {pool: await _capacity(driver, co, pool) for pool in driver.homes}
        survivors = await _survivors(driver, co)
        for volume in survivors:
            await Life(co, root, SEED, 0).verify(volume)
        _check_nothing_left(driver, survivors)
        for volume in survivors:
            if volume.fs_type == "ext4":
                image = pool_layout.image(driver.homes[volume.pool] / "state", volume.volume_id)
                subprocess.run(["e2fsck", "-fn", str(image)], check=True, capture_output=True)  # noqa: ASYNC221
        for pool, most in before.items():
            rest = most - sum(volume.size_bytes for volume in survivors if volume.pool == pool)
            assert rest - SLACK_BYTES <= await _capacity(driver, co, pool) <= rest + MIB
        for volume in survivors:
            await Life(co, root, SEED, 0).delete(volume)
        _check_nothing_left(driver, [])
        for pool, most in before.items():
            assert most - SLACK_BYTES <= await _capacity(driver, co, pool) <= most
