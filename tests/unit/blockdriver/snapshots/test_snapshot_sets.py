"""Sets of snapshots: records, pages, removal, and a full pool at each write."""

import asyncio
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.blockdriver.driver import Driver
from crust.core import errors, volumes
from tests.support.drivers import driver_state
from tests.support.drivers.memory_backend import MemoryBackend, NewMemorySnapshotSet
from tests.support.faults.crashes import at_call, no_space
from tests.support.raised import raised
from tests.support.records import pool_layout

Take = Callable[[Driver, "list[volumes.VolumeId]"], None]


def take_group(driver: Driver, ids: list[volumes.VolumeId]) -> None:
    asyncio.run(driver.controller.snapshots.create_group("g", ids))


def take_one(driver: Driver, ids: list[volumes.VolumeId]) -> None:
    asyncio.run(driver.controller.snapshots.create("s", ids[0]))


def two_volumes(driver: Driver) -> list[volumes.VolumeId]:
    provisioner = driver.controller.provisioner

    async def create() -> list[volumes.VolumeId]:
        made = [await provisioner.create(driver_state.create(name)) for name in ("a", "b")]
        return [volumes.VolumeId(volume.volume_id) for volume in made]

    return asyncio.run(create())


@pytest.mark.parametrize("take", [take_one, take_group])
def test_take_with_one_failed_write_leaves_all_or_nothing(tmp_path: Path, take: Take) -> None:
    for number in range(1000):
        root = tmp_path / str(number)
        root.mkdir()
        backend = MemoryBackend()
        driver = driver_state.opened(root, backend=backend)
        ids = two_volumes(driver)
        failed = False
        with at_call(number, no_space) as count:
            try:
                take(driver, ids)
            except errors.CrustError:
                failed = True
        if count() <= number:
            assert number > 5
            return
        if failed:
            asyncio.run(driver.collect_garbage())
            left = pool_layout.set_records(root / "state"), backend.snapshots
            assert left == (set(), {}), number
        take(driver, ids)
    raise AssertionError("the operation has no end")


async def test_snapshot_above_the_limit_of_its_volume_is_refused(tmp_path: Path) -> None:
    """Snapshots in groups count, and a restart counts them again. A repeat of a snapshot that exists is none more."""
    backend = MemoryBackend()
    driver = driver_state.opened(tmp_path, backend=backend, max_snapshots_per_volume=2)
    names = [driver_state.create(name) for name in ("a", "b")]
    made = [await driver.controller.provisioner.create(name) for name in names]
    full, other = (volume.volume_id for volume in made)
    one = await driver.controller.snapshots.create("s", full)
    await driver.controller.snapshots.create_group("g", [full])
    driver.stores.pool.let_go()
    again = driver_state.opened(tmp_path, backend=backend, max_snapshots_per_volume=2)
    snapshots = again.controller.snapshots
    with raised("SnapshotLimitReached"):
        await snapshots.create("t", full)
    with raised("SnapshotLimitReached"):
        await snapshots.create_group("h", [other, full])
    await snapshots.create("t", other)
    assert (await snapshots.create("s", full)).set_id == one.set_id
    snapshots.delete(one.set_id)
    await snapshots.create("u", full)


def test_group_on_a_full_pool_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies fill the pool, so the record cannot be written."""
    backend = MemoryBackend()
    driver = driver_state.opened(tmp_path, backend=backend)
    ids = two_volumes(driver)

    def full(_: NewMemorySnapshotSet, record: bytes) -> None:
        raise errors.Exhausted("cannot write", why=os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(NewMemorySnapshotSet, "commit", full)
        with pytest.raises(errors.Exhausted):
            take_group(driver, ids)
    assert (pool_layout.set_records(tmp_path / "state"), backend.snapshots) == (set(), {})
    assert driver.stores.provisioning.unsettled() == ()


def test_member_of_a_group_is_not_deleted_alone(tmp_path: Path) -> None:
    driver = driver_state.opened(tmp_path)
    take_group(driver, two_volumes(driver))
    kept, member = next(driver.controller.snapshots.page("", ""))
    with raised("SnapshotBelongsToGroup"):
        driver.controller.snapshots.delete(member.snapshot_id)
    driver.controller.snapshots.delete_group(
        kept.set_id, [snapshot.snapshot_id for snapshot in kept.snapshots]
    )
    driver.controller.snapshots.delete(member.snapshot_id)
    assert list(driver.controller.snapshots.page("", "")) == []


def test_call_for_snapshot_finds_no_group_and_vice_versa(tmp_path: Path) -> None:
    driver = driver_state.opened(tmp_path)
    ids = two_volumes(driver)
    take_group(driver, ids)
    take_one(driver, ids)
    sets, pool_ids = driver.controller.snapshots, driver.stores.pool.ids
    group, single = pool_ids.group_id("g"), pool_ids.snapshot_id("s")
    with raised("SnapshotNotFound"):
        sets.find(group)
    with raised("GroupNotFound"):
        sets.get_group(single, [single])
    sets.delete(group)
    sets.delete_group(single, [single])
    assert {kept.set_id for kept, _ in sets.page("", "")} == {group, single}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pages_have_each_snapshot_once(tmp_path: Path, count: int) -> None:
    driver = driver_state.opened(tmp_path)
    ids = two_volumes(driver)
    for name in ("g", "h"):
        asyncio.run(driver.controller.snapshots.create_group(name, ids))
    for name in ("s", "t", "u"):
        asyncio.run(driver.controller.snapshots.create(name, ids[0]))
    for source, wanted in (("", 7), (ids[0], 5), (ids[1], 2)):
        listed: list[str] = []
        while page := list(
            itertools.islice(driver.controller.snapshots.page(source, (listed or [""])[-1]), count)
        ):
            listed += [snapshot.snapshot_id for _, snapshot in page]
        assert len(listed) == len(set(listed)) == wanted


async def test_collect_leaves_a_snapshot_that_a_call_takes_alone(tmp_path: Path) -> None:
    """What is half made is removed by the collection, and not while a call works on it."""
    driver = driver_state.opened(tmp_path)
    set_id = volumes.VolumeId(driver.stores.pool.ids.snapshot_id("s"))
    (tmp_path / "state" / "snapshots" / f".new-{set_id}").mkdir()

    async def during() -> None:
        await driver.collect_garbage()
        assert driver.stores.provisioning.unsettled() == (set_id,)

    await driver.stores.running.run(set_id, "CreateSnapshot", None, during)
    await driver.collect_garbage()
    assert driver.stores.provisioning.unsettled() == ()
