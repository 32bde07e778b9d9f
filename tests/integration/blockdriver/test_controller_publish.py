"""Published by the controller, seen on the node; health in each CSI profile."""

from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.engines.protocol import StillAttached
from crust.blockdriver.records.capability_check import PublishedToOtherNode
from crust.blockdriver.records.models import Attached, Usage
from crust.core import volumes
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, caller, mount
from tests.support.raised import raised
from tests.support.records import pool_layout

pytestmark = pytest.mark.root


async def entries(bench: Bench) -> dict[str, Any]:
    answer = await bench.driver.controller.ListVolumes(csi_pb2.ListVolumesRequest(), caller())
    return {each.volume.volume_id: each for each in answer.entries}


async def test_volume_published_read_only_to_a_node_refuses_writes(bench: Bench) -> None:
    volume_id = await bench.staged()
    target = bench.target("a")
    await bench.publish(volume_id, target)
    await bench.unpublish(volume_id, target)
    await bench.unstage(volume_id)
    await bench.attach(volume_id, readonly=True)
    bench.restart()
    await bench.stage(volume_id)
    await bench.publish(volume_id, target)
    with pytest.raises(OSError, match="Read-only"):
        Path(target, "file").write_text("words")
    await bench.publish(volume_id, target)


async def test_stage_needs_no_controller_publish_unless_another_node_has_it(bench: Bench) -> None:
    """With attachRequired: false the CO publishes to no node; a moved pool may still name its old one."""
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    volume_records = bench.driver.stores.volume_records
    usage = Usage(kind="mount", fs_type="ext4", mode=7)
    elsewhere = Attached(node_id="renamed-since", usage=usage, readonly=False)
    volume_records.save(volume_records.load(volume_id).but(nodes=(elsewhere,)))
    with pytest.raises(PublishedToOtherNode, match="renamed-since"):
        await bench.stage(volume_id)
    assert bench.driver.stores.access.attached(volume_id) is None
    volume_records.save(volume_records.load(volume_id).but(nodes=()))
    await bench.stage(volume_id)


async def test_list_names_the_node_and_unpublish_of_a_staged_volume_is_refused(
    bench: Bench,
) -> None:
    volume_id = (await bench.create()).volume_id
    assert list((await entries(bench))[volume_id].status.published_node_ids) == []
    await bench.attach(volume_id)
    await bench.stage(volume_id)
    entry = (await entries(bench))[volume_id]
    assert list(entry.status.published_node_ids) == ["node-1"]
    assert dict(entry.volume.accessible_topology[0].segments) == {"crust.dev/node": "node-1"}
    with pytest.raises(StillAttached):
        await bench.release(volume_id)
    await bench.unstage(volume_id)
    await bench.release(volume_id)
    assert list((await entries(bench))[volume_id].status.published_node_ids) == []
    await bench.delete(volume_id)


async def test_lost_image_is_reported_by_both_profiles_and_keeps_its_record(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    volume_id = (await bench.create(capability=mount())).volume_id
    image = pool_layout.image(tmp_path / "state", volume_id)
    image.rename(tmp_path / "away")
    entry = (await entries(bench))[volume_id]
    assert entry.status.volume_condition.abnormal
    with raised("NotInCsiProfile"):
        await bench.driver.controller.ControllerListVolumeHealth(
            csi_pb2.ControllerListVolumeHealthRequest(), caller()
        )
    newer = Bench(tmp_path, profile="1.13")
    assert not (await entries(newer))[volume_id].status.HasField("volume_condition")
    controller, node = newer.driver.controller, newer.driver.node
    answer = await controller.ControllerGetVolumeHealth(
        csi_pb2.ControllerGetVolumeHealthRequest(volume_id=volume_id), caller()
    )
    (status,) = answer.volume_health.health_statuses
    assert (status.status, status.reason) == (csi_pb2.DATA_LOSS, "ImageMissing")
    assert len(status.message.encode()) <= 128
    (tmp_path / "away").rename(image)
    healthy = await node.NodeGetVolumeHealth(
        csi_pb2.NodeGetVolumeHealthRequest(volume_id=volume_id), caller()
    )
    assert healthy.volume_health.volume_id == volume_id
    assert not healthy.volume_health.health_statuses
    pool = await node.NodeGetStorageHealth(csi_pb2.NodeGetStorageHealthRequest(), caller())
    assert not pool.backend_health
    image.parent.parent.rename(tmp_path / "pool")
    pool = await node.NodeGetStorageHealth(csi_pb2.NodeGetStorageHealthRequest(), caller())
    assert [each.status for each in pool.backend_health] == [csi_pb2.STORAGE_UNREACHABLE]


async def test_get_capacity_shrinks_by_provisioned_and_not_by_written_bytes(bench: Bench) -> None:
    async def available() -> int:
        request = csi_pb2.GetCapacityRequest(
            accessible_topology=csi_pb2.Topology(segments={"crust.dev/node": "node-1"})
        )
        answer = await bench.driver.controller.GetCapacity(request, caller())
        assert answer.maximum_volume_size.value <= answer.available_capacity
        return answer.available_capacity

    # Others write to the same filesystem while this runs: only a much larger difference is significant.
    size = await available() // 2 // MIB * MIB
    before = await available()
    volume_id = (await bench.create(size=size)).volume_id
    assert abs(before - size - await available()) < size // 4
    await bench.delete(volume_id)
    assert abs(before - await available()) < size // 4
