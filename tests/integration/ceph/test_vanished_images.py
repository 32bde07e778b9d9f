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
from examples.cluster.ceph_cluster import POOL
from tests.integration.ceph.test_node import SIZE, Cluster, cluster
from tests.integration.ceph.test_unexpected_images import check_untouched, put_foreign
from tests.support.faults.refusals import refused

__all__ = ["cluster"]

pytestmark = pytest.mark.timeout(240)

LOSS = grpc.StatusCode.DATA_LOSS
MODIFIED = {"readIOPS": "500"}


def remove_image(cluster: Cluster, name: str) -> None:
    with cluster.ceph.ioctx(POOL, cluster.namespace) as ioctx:
        rbd.RBD().remove(ioctx, name)


def remove_snapshot(cluster: Cluster, volume_id: str, snapshot_id: str) -> None:
    with (
        cluster.ceph.ioctx(POOL, cluster.namespace) as ioctx,
        rbd.Image(ioctx, volume_id) as image,
    ):
        image.remove_snap(snapshot_id)


def records(cluster: Cluster, kind: RecordKind) -> list[str]:
    with cluster.ceph.ioctx(POOL, cluster.namespace) as ioctx:
        return [each for each, _ in omap.read(ioctx, object_name(kind), "d.")]


def restored(cluster: Cluster, name: str, snapshot_id: str) -> Any:
    """CreateVolume from a snapshot."""
    return cluster.create(name, snapshot=snapshot_id)


def snapshot(cluster: Cluster) -> Any:
    request = csi_pb2.CreateSnapshotRequest(
        source_volume_id=cluster.volume.volume_id, name="snapshot"
    )
    return cluster.controller.CreateSnapshot(request, timeout=60)


def validate(cluster: Cluster) -> Any:
    request = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=cluster.volume.volume_id, volume_capabilities=[Cluster.capability()]
    )
    return cluster.controller.ValidateVolumeCapabilities(request, timeout=60)


def modify(cluster: Cluster, parameters: dict[str, str]) -> Any:
    request = csi_pb2.ControllerModifyVolumeRequest(
        volume_id=cluster.volume.volume_id, mutable_parameters=parameters
    )
    return cluster.controller.ControllerModifyVolume(request, timeout=60)


def expand(cluster: Cluster) -> Any:
    request = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=cluster.volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(required_bytes=2 * SIZE),
    )
    return cluster.controller.ControllerExpandVolume(request, timeout=60)


async def test_volume_without_its_image_is_lost_to_every_call_and_is_not_made_again(
    cluster: Cluster,
) -> None:
    volume_id = cluster.volume.volume_id
    remove_image(cluster, volume_id)
    for _ in range(2):
        calls: list[Callable[[], Any]] = [
            lambda: cluster.create("one"),
            lambda: validate(cluster),
            lambda: modify(cluster, MODIFIED),
            lambda: expand(cluster),
            lambda: snapshot(cluster),
        ]
        for call in calls:
            await refused(call(), LOSS, "[ImageMissing]", volume_id, "delete the volume")
        found = await cluster.controller.ControllerGetVolume(
            csi_pb2.ControllerGetVolumeRequest(volume_id=volume_id), timeout=60
        )
        assert found.status.volume_condition.abnormal
        assert cluster.images() == []
    await cluster.delete(volume_id)
    assert records(cluster, RecordKind.VOLUMES) == []
    assert (await cluster.create("one")).volume.volume_id == volume_id, "after its end it is new"
    await cluster.delete(volume_id)


async def test_request_that_differs_from_a_lost_volumes_is_a_conflict(cluster: Cluster) -> None:
    remove_image(cluster, cluster.volume.volume_id)
    await refused(
        cluster.create("one", size=4 * SIZE),
        grpc.StatusCode.ALREADY_EXISTS,
        "[VolumeExistsDifferently]",
    )
    await cluster.delete(cluster.volume.volume_id)


async def test_foreign_image_in_a_volumes_place_is_used_by_no_call(cluster: Cluster) -> None:
    volume_id = cluster.volume.volume_id
    image_id = put_foreign(cluster, volume_id)
    for call in (
        lambda: cluster.create("one"),
        lambda: validate(cluster),
        lambda: modify(cluster, MODIFIED),
        lambda: expand(cluster),
        lambda: snapshot(cluster),
        cluster.stage,
    ):
        await refused(call(), LOSS, "[ForeignImage]", volume_id, "`rbd image-meta set")
        check_untouched(cluster, volume_id, image_id)


async def test_snapshot_that_vanished_is_lost_to_its_retry_and_to_a_restore(
    cluster: Cluster,
) -> None:
    volume_id = cluster.volume.volume_id
    taken = (await snapshot(cluster)).snapshot.snapshot_id
    copy = (await restored(cluster, "copy", taken)).volume.volume_id
    await cluster.delete(copy)
    remove_snapshot(cluster, volume_id, taken)
    for _ in range(2):
        calls: list[Callable[[], Any]] = [
            lambda: snapshot(cluster),
            lambda: restored(cluster, "new", taken),
        ]
        for call in calls:
            await refused(call(), LOSS, "[SnapshotMissing]", taken, "delete the snapshot")
        assert cluster.images() == [volume_id]
    assert len(records(cluster, RecordKind.VOLUMES)) == 1
    for _ in range(2):
        await cluster.controller.DeleteSnapshot(
            csi_pb2.DeleteSnapshotRequest(snapshot_id=taken), timeout=60
        )
    assert records(cluster, RecordKind.SNAPSHOTS) == []
    assert (await snapshot(cluster)).snapshot.snapshot_id == taken, "after its end it is new"
    remove_with_snapshots(cluster, volume_id)
    await refused(snapshot(cluster), LOSS, "[SnapshotMissing]", taken)
    await cluster.controller.DeleteSnapshot(
        csi_pb2.DeleteSnapshotRequest(snapshot_id=taken), timeout=60
    )
    await cluster.delete(volume_id)
    assert records(cluster, RecordKind.SNAPSHOTS) == records(cluster, RecordKind.VOLUMES) == []


def remove_with_snapshots(cluster: Cluster, volume_id: str) -> None:
    with cluster.ceph.ioctx(POOL, cluster.namespace) as ioctx:
        with rbd.Image(ioctx, volume_id) as image:
            for each in list(image.list_snaps()):
                image.remove_snap(each["name"])
        rbd.RBD().remove(ioctx, volume_id)


async def test_volume_that_was_restored_and_vanished_is_not_restored_a_second_time(
    cluster: Cluster,
) -> None:
    taken = (await snapshot(cluster)).snapshot.snapshot_id
    copy = (await restored(cluster, "copy", taken)).volume.volume_id
    remove_image(cluster, copy)
    await refused(restored(cluster, "copy", taken), LOSS, "[ImageMissing]", copy)
    assert cluster.images() == [cluster.volume.volume_id]
    await cluster.delete(copy)
    await cluster.delete(cluster.volume.volume_id)


async def test_group_with_a_member_that_vanished_is_lost_to_its_retry_and_can_be_deleted(
    cluster: Cluster,
) -> None:
    other = (await cluster.create("other")).volume.volume_id
    groups = csi_pb2_grpc.GroupControllerStub(cluster.connected)
    request = csi_pb2.CreateVolumeGroupSnapshotRequest(
        name="group", source_volume_ids=[cluster.volume.volume_id, other]
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
    assert records(cluster, RecordKind.GROUPS) == records(cluster, RecordKind.SNAPSHOTS) == []
