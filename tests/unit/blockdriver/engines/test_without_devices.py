"""An engine whose images only hypervisors open: calls that need no host device work, the others are refused."""

from pathlib import Path

import pytest

from crust.blockdriver import app
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines import protocol
from crust.blockdriver.node.node_state import Published
from crust.core import volumes
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import create_request
from tests.support.drivers import memory_backend
from tests.support.drivers.block_driver import MIB, caller
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.raised import raised
from tests.support.runtimes.fake_guests import FakeGuests


@pytest.fixture
def runtime_guests() -> FakeGuests:
    return FakeGuests()


@pytest.fixture
def driver(tmp_path: Path, runtime_guests: FakeGuests) -> Driver:
    (tmp_path / "state").mkdir()
    made = app.build(
        state_dir=str(tmp_path / "state"),
        run_dir=str(tmp_path / "run"),
        node_id="node-1",
        csi_profile="1.13",
        target_roots=(str(tmp_path),),
        engine=memory_backend.engine(str(tmp_path / "state"), MemoryBackend(has_devices=False)),
        runtime_guests=runtime_guests,
    )
    made.open()
    return made


async def create(
    driver: Driver, name: str, *, source: str = "", snapshot: str = ""
) -> volumes.VolumeId:
    request = create_request(name, size=0, volume=source, snapshot=snapshot)
    answer = await driver.controller.CreateVolume(request, caller())
    return volumes.VolumeId(answer.volume.volume_id)


async def take(driver: Driver, volume_id: str) -> str:
    request = csi_pb2.CreateSnapshotRequest(source_volume_id=volume_id, name="snap")
    return (await driver.controller.CreateSnapshot(request, caller())).snapshot.snapshot_id


async def test_volume_lifecycle_without_host_device_succeeds(driver: Driver) -> None:
    one = await create(driver, "one")
    driver.stores.access.attach(one)
    taken = await take(driver, one)
    await create(driver, "restored", snapshot=taken)
    await create(driver, "clone", source=one)
    listed = await driver.controller.ListVolumes(csi_pb2.ListVolumesRequest(), caller())
    assert len(listed.entries) == 3
    health = await driver.controller.ControllerListVolumeHealth(
        csi_pb2.ControllerListVolumeHealthRequest(), caller()
    )
    assert len(health.entries) == 3
    await driver.controller.ControllerExpandVolume(
        csi_pb2.ControllerExpandVolumeRequest(
            volume_id=one, capacity_range=csi_pb2.CapacityRange(required_bytes=2048 * MIB)
        ),
        caller(),
    )
    await driver.controller.ControllerModifyVolume(
        csi_pb2.ControllerModifyVolumeRequest(
            volume_id=one, mutable_parameters={"readIOPS": "100"}
        ),
        caller(),
    )
    delete = csi_pb2.DeleteVolumeRequest(volume_id=one)
    with pytest.raises(protocol.StillAttached, match="hypervisor"):
        await driver.controller.DeleteVolume(delete, caller())
    await driver.collect_garbage()
    assert driver.stores.access.attached(one) is None, "it was never staged"
    await driver.controller.DeleteVolume(delete, caller())
    await driver.snapshots.volume_snapshots.create(
        "again", driver.stores.pool.ids.volume_id("clone")
    )


async def test_snapshot_freezes_a_guest_that_opens_the_image(
    driver: Driver, runtime_guests: FakeGuests, tmp_path: Path
) -> None:
    one, target = await create(driver, "one"), str(tmp_path / "target")
    driver.stores.access.attach(one)
    guest = runtime_guests.add(target)
    driver.stores.node_state.note_published(
        Published(
            volume_id=one,
            target=target,
            kind="mount",
            fs_type="ext4",
            mode=1,
            options=(),
            readonly=False,
            deferred=True,
            fingerprint="",
            done=True,
        )
    )
    await take(driver, one)
    assert [verb for verb, _ in runtime_guests.asked] == ["freeze", "thaw"]
    assert not guest.frozen


async def test_group_of_volumes_that_other_nodes_use_is_copied_until_none_is_written_to(
    driver: Driver,
) -> None:
    backend = driver.stores.engine.provisioning
    assert isinstance(backend, MemoryBackend)
    ids = sorted([await create(driver, "one"), await create(driver, "two")])
    backend.is_used_elsewhere, backend.written = True, [{ids[0]}, {ids[0]}]
    group, taken = await driver.snapshots.group_snapshots.create("group", ids)
    assert (group.phase, [each.phase for each in taken]) == ("ready", ["ready", "ready"])
    assert backend.taken == [*ids, *ids, *ids]
    assert backend.snapshot_ids() == {each.snapshot_id for each in taken}


async def test_group_of_volumes_that_other_nodes_write_all_the_time_is_refused(
    driver: Driver,
) -> None:
    backend = driver.stores.engine.provisioning
    assert isinstance(backend, MemoryBackend)
    ids = sorted([await create(driver, "one"), await create(driver, "two")])
    backend.is_used_elsewhere, backend.written = True, [set(ids)] * 8
    with raised("GroupNeverIdle", match=ids[0]):
        await driver.snapshots.group_snapshots.create("group", ids)
    assert backend.snapshot_ids() == frozenset()
