"""What was answered once and was removed behind crust's back: never OK again, never recreated, and it can be deleted.

By the controller's socket, on a real cluster. What the calls on a node answer is in `test_refusals_by_socket.py`.
"""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
import rbd

from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.engines.rbd.records import object_name
from crust.ceph import omap
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.integration.ceph.test_unexpected_images import check_untouched, put_foreign
from tests.support.ceph.rbd_node import SIZE, RbdNode
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.timeout(240)

LOSS = grpc.StatusCode.DATA_LOSS
MODIFIED = {"readIOPS": "500"}


def remove_image(cluster: RbdNode, name: str) -> None:
    with cluster.ioctx() as ioctx:
        rbd.RBD().remove(ioctx, name)


def remove_snapshot(cluster: RbdNode, volume_id: str, snapshot_id: str) -> None:
    with (
        cluster.ioctx() as ioctx,
        rbd.Image(ioctx, volume_id) as image,
    ):
        image.remove_snap(snapshot_id)


def records(cluster: RbdNode, kind: RecordKind) -> list[str]:
    with cluster.ioctx() as ioctx:
        return [each for each, _ in omap.read(ioctx, object_name(kind), "d.")]


async def test_volume_without_its_image_is_lost_and_not_remade(cluster: RbdNode) -> None:
    volume_id = cluster.volume
    remove_image(cluster, volume_id)
    for _ in range(2):
        calls: list[Callable[[], Any]] = [
            lambda: cluster.create("one"),
            cluster.is_confirmed,
            lambda: cluster.controller.modify(cluster.volume, **MODIFIED),
            cluster.grow,
            cluster.snapshot,
        ]
        for call in calls:
            await refused(call(), LOSS, "[ImageMissing]", volume_id, "delete the volume")
        found = await cluster.controller.controller.ControllerGetVolume(
            csi_pb2.ControllerGetVolumeRequest(volume_id=volume_id), timeout=60
        )
        assert found.status.volume_condition.abnormal
        assert cluster.images() == []
    await cluster.delete(volume_id)
    assert records(cluster, RecordKind.VOLUMES) == []
    assert await cluster.create("one") == volume_id, "after its end it is new"
    await cluster.delete(volume_id)


async def test_request_that_differs_from_a_lost_volumes_is_a_conflict(cluster: RbdNode) -> None:
    remove_image(cluster, cluster.volume)
    await refused(
        cluster.create("one", size=4 * SIZE),
        grpc.StatusCode.ALREADY_EXISTS,
        "[VolumeExistsDifferently]",
    )
    await cluster.delete(cluster.volume)


async def test_foreign_image_in_a_volumes_place_is_used_by_no_call(cluster: RbdNode) -> None:
    volume_id = cluster.volume
    image_id = put_foreign(cluster, volume_id)
    for call in (
        lambda: cluster.create("one"),
        cluster.is_confirmed,
        lambda: cluster.controller.modify(cluster.volume, **MODIFIED),
        cluster.grow,
        cluster.snapshot,
        cluster.stage,
    ):
        await refused(call(), LOSS, "[ForeignImage]", volume_id, "`rbd image-meta set")
        check_untouched(cluster, volume_id, image_id)


async def test_vanished_snapshot_is_lost_to_retry_and_restore(cluster: RbdNode) -> None:
    volume_id = cluster.volume
    taken = await cluster.snapshot()
    copy = await cluster.create("copy", snapshot=taken)
    await cluster.delete(copy)
    remove_snapshot(cluster, volume_id, taken)
    for _ in range(2):
        calls: list[Callable[[], Any]] = [
            cluster.snapshot,
            lambda: cluster.create("new", snapshot=taken),
        ]
        for call in calls:
            await refused(call(), LOSS, "[SnapshotMissing]", taken, "delete the snapshot")
        assert cluster.images() == [volume_id]
    assert len(records(cluster, RecordKind.VOLUMES)) == 1
    for _ in range(2):
        await cluster.controller.delete_snapshot(taken)
    assert records(cluster, RecordKind.SNAPSHOTS) == []
    assert await cluster.snapshot() == taken, "after its end it is new"
    remove_with_snapshots(cluster, volume_id)
    await refused(cluster.snapshot(), LOSS, "[SnapshotMissing]", taken)
    await cluster.controller.delete_snapshot(taken)
    await cluster.delete(volume_id)
    assert records(cluster, RecordKind.SNAPSHOTS) == records(cluster, RecordKind.VOLUMES) == []


def remove_with_snapshots(cluster: RbdNode, volume_id: str) -> None:
    with cluster.ioctx() as ioctx:
        with rbd.Image(ioctx, volume_id) as image:
            for each in list(image.list_snaps()):
                image.remove_snap(each["name"])
        rbd.RBD().remove(ioctx, volume_id)


async def test_vanished_restored_volume_is_not_restored_again(cluster: RbdNode) -> None:
    taken = await cluster.snapshot()
    copy = await cluster.create("copy", snapshot=taken)
    remove_image(cluster, copy)
    await refused(cluster.create("copy", snapshot=taken), LOSS, "[ImageMissing]", copy)
    assert cluster.images() == [cluster.volume]
    await cluster.delete(copy)
    await cluster.delete(cluster.volume)


async def test_group_with_a_vanished_member_can_be_deleted(cluster: RbdNode) -> None:
    other = await cluster.create("other")
    groups: csi_pb2_grpc.GroupControllerAsyncStub = csi_pb2_grpc.GroupControllerStub(
        cluster.controller.channel
    )
    request = csi_pb2.CreateVolumeGroupSnapshotRequest(
        name="group", source_volume_ids=[cluster.volume, other]
    )
    made = (await groups.CreateVolumeGroupSnapshot(request, timeout=60)).group_snapshot
    lost = next(each for each in made.snapshots if each.source_volume_id == other)
    remove_snapshot(cluster, other, lost.snapshot_id)
    for _ in range(2):
        call = groups.CreateVolumeGroupSnapshot(request, timeout=60)
        await refused(call, LOSS, "[SnapshotMissing]", lost.snapshot_id, "delete")
    members = [each.snapshot_id for each in made.snapshots]
    for _ in range(2):
        await groups.DeleteVolumeGroupSnapshot(
            csi_pb2.DeleteVolumeGroupSnapshotRequest(
                group_snapshot_id=made.group_snapshot_id, snapshot_ids=members
            ),
            timeout=60,
        )
    assert records(cluster, RecordKind.SNAPSHOTS) == []
