"""Deferral, for plugins that advertise it (C-501 to C-503)."""

from crust.conformance.case import CREATE, DEFER, beyond, case
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2

_GIVEN = "parameters.deferral"


@case(501, CREATE, DEFER, _GIVEN)
@beyond("crust's deferral D-8, D-9, D-11", "a deferred publish mounts nothing")
def test_a_deferred_publish_mounts_nothing(co: Co) -> None:
    """Deferral D-8, D-9, D-11: no mount at the target, and an answer with the device, its identity and its
    size.
    """
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    request = co.publish_request(volume, target)
    request.defer_fs_ops = True
    answer = co.node.NodePublishVolume(
        request, timeout=co.options.timeout_s, metadata=extensions.METADATA
    )
    assert not co.host.mounts_at(target)
    assert answer.HasField("deferred_mount")
    deferred = answer.deferred_mount
    assert deferred.block_device.path.startswith("/")
    assert deferred.block_device.identity.disk_sequence
    assert deferred.fs_type == co.mount.mount.fs_type
    assert deferred.capacity_bytes >= (volume.capacity_bytes or 1)


@case(502, CREATE, DEFER, _GIVEN)
@beyond("crust's deferral D-9, D-17", "without the flag there is no deferred_mount")
def test_publish_without_flag_mounts(co: Co) -> None:
    """Deferral D-9, D-17: without the flag there is no deferred_mount; at a deferred target it is
    ALREADY_EXISTS.
    """
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    request = co.publish_request(volume, target)
    request.defer_fs_ops = True
    co.node.NodePublishVolume(request, timeout=co.options.timeout_s, metadata=extensions.METADATA)
    request.defer_fs_ops = False
    co.refused(co.node.NodePublishVolume, request, Code.ALREADY_EXISTS)
    assert not co.host.mounts_at(target)
    co.unpublish(volume.volume_id, target)
    answer = co.ask(co.node.NodePublishVolume, request)
    assert not answer.HasField("deferred_mount")
    assert co.host.mounts_at(target) == 1


@case(503, CREATE, DEFER, _GIVEN)
@beyond("crust's deferral D-14, D-18", "an unpublish needs no flag")
def test_unpublish_without_flag_ends_deferred_publish(co: Co) -> None:
    """Deferral D-14, D-18: NodeUnpublishVolume without the flag is OK, again as well, and the volume can
    be deleted.
    """
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    request = co.publish_request(volume, target)
    request.defer_fs_ops = True
    co.node.NodePublishVolume(request, timeout=co.options.timeout_s, metadata=extensions.METADATA)
    unpublish = csi_pb2.NodeUnpublishVolumeRequest(
        volume_id=volume.volume_id, target_path=str(target)
    )
    for _ in range(2):
        co.ask(co.node.NodeUnpublishVolume, unpublish)
    co.unstage(volume)
    co.detach(volume.volume_id)
    co.delete(volume.volume_id)
