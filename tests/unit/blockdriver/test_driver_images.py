"""A driver whose images only hypervisors open: what needs no device of the host."""

from pathlib import Path

import pytest

from crust.blockdriver.driver import Driver
from crust.core import volumes
from tests.support.drivers import driver_state
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.raised import raised
from tests.support.runtimes.fake_guests import FakeGuests


@pytest.fixture
def runtime_guests() -> FakeGuests:
    return FakeGuests()


@pytest.fixture
def driver(tmp_path: Path, runtime_guests: FakeGuests) -> Driver:
    backend = MemoryBackend(has_devices=False)
    return driver_state.opened(tmp_path, backend=backend, runtime_guests=runtime_guests)


async def create(driver: Driver, name: str) -> volumes.VolumeId:
    return (await driver.controller.provisioner.create(driver_state.create(name))).volume_id


@pytest.fixture
async def group(driver: Driver) -> list[volumes.VolumeId]:
    """Two volumes that other nodes use."""
    backend = driver.stores.engine.provisioning
    assert isinstance(backend, MemoryBackend)
    backend.is_used_elsewhere = True
    return sorted([await create(driver, "one"), await create(driver, "two")])


async def test_gc_detaches_an_image_that_was_never_staged(driver: Driver) -> None:
    one = await create(driver, "one")
    driver.stores.access.attach(one)
    await driver.collect_garbage()
    assert driver.stores.access.attached(one) is None


async def test_snapshot_freezes_a_guest_that_opens_the_image(
    driver: Driver, runtime_guests: FakeGuests, tmp_path: Path
) -> None:
    one, target = await create(driver, "one"), str(tmp_path / "target")
    driver.stores.access.attach(one)
    guest = runtime_guests.add(target)
    driver.stores.node_state.note_published(driver_state.published(one, target))
    await driver.controller.snapshots.create("snap", one)
    assert [verb for verb, _ in runtime_guests.asked] == ["freeze", "thaw"]
    assert not guest.frozen


async def test_group_used_elsewhere_is_copied_until_nothing_is_written(
    driver: Driver, group: list[volumes.VolumeId]
) -> None:
    backend = driver.stores.engine.provisioning
    assert isinstance(backend, MemoryBackend)
    backend.written = [{group[0]}, {group[0]}]
    taken = await driver.controller.snapshots.create_group("group", group)
    assert backend.taken == [*group, *group, *group]
    assert backend.snapshot_ids() == {snapshot.snapshot_id for snapshot in taken.snapshots}


async def test_group_that_other_nodes_write_all_the_time_is_refused(
    driver: Driver, group: list[volumes.VolumeId]
) -> None:
    backend = driver.stores.engine.provisioning
    assert isinstance(backend, MemoryBackend)
    backend.written = [set(group)] * 8
    with raised("GroupNeverIdle", match=group[0]):
        await driver.controller.snapshots.create_group("group", group)
    assert backend.snapshot_ids() == frozenset()
