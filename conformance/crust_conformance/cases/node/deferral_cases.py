"""A deferred NodePublishVolume, and its NodeUnpublishVolume (C-501 to C-505)."""

from crust.rpc.messages import extensions
from crust_conformance.orchestrator.calls import Code
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.volume_capabilities import mount

_GROUP = "volume_supplemental_group"
_POLICY = "volume_supplemental_group_change_policy"
_DELEGATED = "volume_mount_group"
_NEEDS = {
    _POLICY: "node.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY",
    _DELEGATED: "node.VOLUME_MOUNT_GROUP",
}
"""Without it a CO does not send the field."""
_INVALID = (
    *({_GROUP: group} for group in ("0", "-1", "4294967295", "0x10", "staff", "1.5")),
    {_GROUP: "4321", _POLICY: "Never"},
    {_POLICY: "Always"},
    {_GROUP: "4321", _DELEGATED: "4322"},
)


def test_c501_a_deferred_publish_mounts_nothing(co: Co) -> None:
    volume, target = co.staged()
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
    volume, target = co.staged()
    request = co.publish_request(volume, target)
    co.deferred(request)
    request.defer_fs_ops = False
    co.answered(request, Code.ALREADY_EXISTS)
    assert not co.host.mounts_at(target)
    co.unpublish(volume.volume_id, target)
    answer = co.ask(request)
    assert not answer.HasField("deferred_mount")
    assert co.host.mounts_at(target) == 1


def test_c503_unpublish_without_flag_ends_deferred_publish(co: Co) -> None:
    volume, target = co.staged()
    request = co.publish_request(volume, target)
    co.deferred(request)
    unpublish = co.unpublish_request(volume.volume_id, target)
    for _ in range(2):
        co.ask(unpublish)
    co.unstage(volume)
    co.detach(volume.volume_id)
    co.delete(volume.volume_id)


def test_c504_deferred_group_and_filesystem_are_requested_ones(co: Co) -> None:
    for policy in ("Always", "OnRootMismatch"):
        capability = mount(co.mount.mount.fs_type)
        capability.mount.volume_supplemental_group = "4321"
        if _NEEDS[_POLICY] in co.has:
            capability.mount.volume_supplemental_group_change_policy = policy
        volume = co.volume()
        co.stage(volume, capability)
        answer = co.deferred(co.publish_request(volume, co.target(), capability)).deferred_mount
        assert answer.fs_type == capability.mount.fs_type
        assert answer.supplemental_group == "4321"
        if _NEEDS[_POLICY] in co.has:
            assert answer.supplemental_group_change_policy == policy


def test_c505_invalid_group_or_policy_is_refused(co: Co) -> None:
    volume, target = co.staged()
    for fields in _INVALID:
        if not {_NEEDS[field] for field in fields if field in _NEEDS} <= co.has:
            continue
        request = co.publish_request(volume, target)
        request.defer_fs_ops = True
        for field, value in fields.items():
            setattr(request.volume_capability.mount, field, value)
        co.answered(request, Code.INVALID_ARGUMENT, metadata=extensions.METADATA)
