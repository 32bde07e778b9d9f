"""A full pool at each write of a snapshot and of a group: all of it is there, or nothing is left for good."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.blockdriver.driver import Driver
from crust.blockdriver.records.models import SnapshotRecord
from crust.core import errors, volumes
from tests.support.drivers import driver_state
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.faults.crashes import at_call, no_space
from tests.support.raised import raised

Take = Callable[[Driver, "list[volumes.VolumeId]"], None]


def take_group(driver: Driver, ids: list[volumes.VolumeId]) -> None:
    asyncio.run(driver.snapshots.group_snapshots.create("g", ids))


def take_one(driver: Driver, ids: list[volumes.VolumeId]) -> None:
    asyncio.run(driver.snapshots.volume_snapshots.create("s", ids[0]))


def two_volumes(driver: Driver) -> list[volumes.VolumeId]:
    provisioner = driver.controller_rules.provisioner

    async def create() -> list[volumes.VolumeId]:
        made = [await provisioner.create(driver_state.create(name)) for name in ("a", "b")]
        return [volumes.VolumeId(each.volume_id) for each in made]

    return asyncio.run(create())


def written(root: Path) -> list[str]:
    found = [*root.glob("state/snapshots/*.json"), *root.glob("state/groups/*.json")]
    return sorted(each.name for each in found)


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
            assert number > 10
            return
        if failed:
            asyncio.run(driver.collect_garbage())
            assert (written(root), backend.snapshots) == ([], {}), number
        take(driver, ids)
    raise AssertionError("the operation has no end")


def test_group_on_a_full_pool_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies fill the pool, so "ready" of the second member cannot be written, nor any "deleting"."""
    backend = MemoryBackend()
    driver = driver_state.opened(tmp_path, backend=backend)
    ids = two_volumes(driver)
    records = driver.snapshots.volume_snapshots.snapshot_records
    save, ready = records.save, []

    def full(record: SnapshotRecord) -> SnapshotRecord:
        if record.phase == "ready":
            ready.append(record)
        if len(ready) > 1:
            raise errors.Exhausted("cannot write", why=os.strerror(errno.ENOSPC))
        return save(record)

    with monkeypatch.context() as patched:
        patched.setattr(records, "save", full)
        with pytest.raises(errors.Exhausted):
            take_group(driver, ids)
    assert (written(tmp_path), backend.snapshots) == ([], {})


def test_delete_member_whose_group_is_gone_deletes_it(tmp_path: Path) -> None:
    """Earlier versions left such members; nothing else can name them."""
    driver = driver_state.opened(tmp_path)
    ids = two_volumes(driver)
    take_group(driver, ids)
    groups, taken = driver.snapshots.groups, driver.snapshots.volume_snapshots
    group = next(groups.ready())
    member = group.members[0][1]
    with raised("SnapshotBelongsToGroup"):
        taken.delete(member)
    groups.remove(group.id)
    taken.delete(member)
    assert taken.snapshot_records.find(member) is None


@pytest.mark.parametrize("phase", ["creating", "deleting"])
def test_collect_discards_incomplete_snapshots_and_groups(tmp_path: Path, phase: str) -> None:
    backend = MemoryBackend()
    driver = driver_state.opened(tmp_path, backend=backend)
    ids = two_volumes(driver)
    take_group(driver, ids)
    take_one(driver, ids)
    groups, snapshots = driver.snapshots.groups, driver.snapshots.volume_snapshots.snapshot_records
    groups.save(next(groups.ready()).model_copy(update={"phase": phase}))
    single = next(each for each in snapshots.ready() if not each.group_id)
    snapshots.save(single.model_copy(update={"phase": phase}))
    asyncio.run(driver.collect_garbage())
    assert (written(tmp_path), backend.snapshots) == ([], {})


async def test_collect_leaves_a_snapshot_that_a_call_takes_alone(tmp_path: Path) -> None:
    driver = driver_state.opened(tmp_path)
    made = await driver.controller_rules.provisioner.create(driver_state.create("a"))
    taken = driver.snapshots.volume_snapshots
    plan = taken.plan(volumes.VolumeId(made.volume_id), taken.pool.ids.snapshot_id("s"), "s")
    taken.snapshot_records.save(plan)
    key = volumes.VolumeKey(driver.name, volumes.VolumeId(plan.snapshot_id))

    async def during() -> None:
        await driver.collect_garbage()
        assert taken.snapshot_records.find(plan.snapshot_id) == plan

    await driver.operations.run(key, "CreateSnapshot", None, during)
    await driver.collect_garbage()
    assert taken.snapshot_records.find(plan.snapshot_id) is None
