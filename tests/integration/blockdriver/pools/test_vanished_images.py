"""Files that were removed behind the driver's back: no call answers OK for them, and none recreates them."""

from collections.abc import Callable
from typing import Any

import pytest

from crust.blockdriver.engines.protocol import ImageMissing, SnapshotMissing
from crust.core import errors
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, caller, mount
from tests.support.records import copies, pool_layout

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]


def validate(bench: Bench, volume_id: str) -> Any:
    request = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=volume_id, volume_capabilities=[csi.capability_to_wire(mount())]
    )
    return bench.driver.controller.ValidateVolumeCapabilities(request, caller())


async def test_volume_without_its_file_is_lost_to_every_call_and_can_be_deleted(
    bench: Bench,
) -> None:
    volume_id = (await bench.create()).volume_id
    await bench.attach(volume_id)
    pool_layout.image(bench.root / "state", volume_id).unlink()
    calls: list[Callable[[], Any]] = [
        bench.create,
        lambda: validate(bench, volume_id),
        lambda: bench.attach(volume_id),
        lambda: bench.grow(volume_id, 128 * MIB),
        lambda: bench.modify(volume_id, readIOPS="100"),
        lambda: copies.snapshot(bench, volume_id),
        lambda: copies.group(bench, volume_id),
        lambda: copies.made_of(bench, "copy", volume_id=volume_id),
        lambda: bench.stage(volume_id),
    ]
    for call in calls:
        with pytest.raises(ImageMissing, match="delete the volume"):
            await call()
    assert pool_layout.images(bench.root / "state") == set()
    await bench.release(volume_id)
    for _ in range(2):
        await bench.delete(volume_id)
    assert bench.driver.stores.volume_records.find(bench.ids.volume_id("pvc-1")) is None
    assert (await bench.create()).volume_id == volume_id, "after its end it is new"


async def test_pod_of_a_volume_whose_file_was_removed_can_end(bench: Bench) -> None:
    volume_id, target = (await bench.create()).volume_id, bench.target("pod")
    await bench.stage(volume_id)
    await bench.publish(volume_id, target)
    pool_layout.image(bench.root / "state", volume_id).unlink()
    with pytest.raises(ImageMissing):
        await bench.create()
    await bench.unpublish(volume_id, target)
    await bench.unstage(volume_id)
    await bench.delete(volume_id)
    assert bench.driver.stores.volume_records.find(bench.ids.volume_id("pvc-1")) is None


async def test_snapshot_without_its_file_is_not_taken_again_by_a_retry(bench: Bench) -> None:
    volume_id = (await bench.create()).volume_id
    taken = await copies.snapshot(bench, volume_id)
    group = await copies.group(bench, volume_id)
    for each in pool_layout.snapshot_images(bench.root / "state"):
        pool_layout.snapshot_image(bench.root / "state", each).unlink()
    calls: list[Callable[[], Any]] = [
        lambda: copies.snapshot(bench, volume_id),
        lambda: copies.group(bench, volume_id),
        lambda: copies.made_of(bench, "copy", snapshot_id=taken.snapshot_id),
    ]
    for call in calls:
        with pytest.raises(SnapshotMissing, match="delete the snapshot") as caught:
            await call()
        assert isinstance(caught.value, errors.Corrupt)
    assert pool_layout.images(bench.root / "state") == {volume_id}
    assert pool_layout.snapshot_images(bench.root / "state") == set()
    await copies.drop(bench, taken.snapshot_id)
    await bench.driver.snapshot_calls.DeleteVolumeGroupSnapshot(
        csi_pb2.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=group.group_snapshot_id,
            snapshot_ids=[each.snapshot_id for each in group.snapshots],
        ),
        caller(),
    )
    assert list((bench.root / "state" / "snapshots").iterdir()) == []
    assert (await copies.snapshot(bench, volume_id)).snapshot_id == taken.snapshot_id
