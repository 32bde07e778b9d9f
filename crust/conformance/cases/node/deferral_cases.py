"""Deferral, for plugins that advertise it (C-501 to C-503)."""

from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co


def test_c501_a_deferred_publish_mounts_nothing(co: Co) -> None:
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    request = co.publish_request(volume, target)
    answer = co.deferred(request)
    assert not co.host.mounts_at(target)
    assert answer.HasField("deferred_mount")
    deferred = answer.deferred_mount
    assert deferred.block_device.path.startswith("/")
    assert deferred.block_device.identity.disk_sequence
    assert deferred.fs_type == co.mount.mount.fs_type
    assert deferred.capacity_bytes >= (volume.capacity_bytes or 1)


def test_c502_publish_without_flag_mounts(co: Co) -> None:
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    request = co.publish_request(volume, target)
    co.deferred(request)
    request.defer_fs_ops = False
    co.refused(request, Code.ALREADY_EXISTS)
    assert not co.host.mounts_at(target)
    co.unpublish(volume.volume_id, target)
    answer = co.ask(request)
    assert not answer.HasField("deferred_mount")
    assert co.host.mounts_at(target) == 1


def test_c503_unpublish_without_flag_ends_deferred_publish(co: Co) -> None:
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    request = co.publish_request(volume, target)
    co.deferred(request)
    unpublish = co.unpublish_request(volume.volume_id, target)
    for _ in range(2):
        co.ask(unpublish)
    co.unstage(volume)
    co.detach(volume.volume_id)
    co.delete(volume.volume_id)
