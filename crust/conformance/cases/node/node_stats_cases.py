"""NodeGetVolumeStats, NodeExpandVolume, health on the node (C-241 to C-262)."""

from crust.conformance.case import (
    BLOCK,
    CHECKS_FS_TYPE,
    CREATE,
    EXPAND,
    NODE_EXPAND,
    STATS,
    beyond,
    case,
    must,
)
from crust.conformance.options import MIB, UNKNOWN_VOLUME
from crust.conformance.orchestrator import expansion
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, block, mount
from crust.wire.csi.v1 import csi_pb2

_Unit = csi_pb2.VolumeUsage


@case(241, CREATE, STATS)
@must(
    "NodeGetVolumeStats Errors",
    "a volume that does not exist at volume_path MUST be NOT_FOUND; volume_id and "
    "volume_path are REQUIRED",
)
def test_stats_need_a_volume_and_its_path(co: Co) -> None:
    """NodeGetVolumeStats: INVALID_ARGUMENT without one of them; NOT_FOUND for no such volume, or not at
    this path.
    """
    volume = co.volume()
    target = co.use(volume)
    request = csi_pb2.NodeGetVolumeStatsRequest
    call = co.node.NodeGetVolumeStats
    co.refused(call, request(volume_path=str(target)), Code.INVALID_ARGUMENT)
    co.refused(call, request(volume_id=volume.volume_id), Code.INVALID_ARGUMENT)
    unknown = request(volume_id=UNKNOWN_VOLUME, volume_path=str(target))
    co.refused(call, unknown, Code.NOT_FOUND)
    elsewhere = request(volume_id=volume.volume_id, volume_path=str(co.target()))
    co.refused(call, elsewhere, Code.NOT_FOUND)


@case(242, CREATE, STATS)
@must("VolumeUsage", "total and unit are REQUIRED, values MUST NOT be negative")
@beyond("NodeGetVolumeStats", "usage is OPTIONAL; kubelets show it, and evict pods by it")
def test_stats_of_a_filesystem_follow_its_use(co: Co) -> None:
    """NodeGetVolumeStats: bytes and inodes of the filesystem; used grows with what is written."""
    volume = co.volume()
    target = co.use(volume)
    before = _stats(co, volume, str(target))
    for each in before.values():
        assert each.unit != _Unit.UNKNOWN, "an entry without a unit"
        assert min(each.total, each.used, each.available) >= 0, f"a negative value: {each}"
    with co.beyond():
        assert {_Unit.BYTES, _Unit.INODES} <= set(before), "bytes or inodes are missing"
        usage = before[_Unit.BYTES]
        assert 0 < usage.used + usage.available <= usage.total
        if not expansion.has_its_own_size(co, volume, target):
            return  # others write to the same filesystem
        co.host.write(target / "file", b"x" * (8 * MIB))
        after = _stats(co, volume, str(target))[_Unit.BYTES]
        assert after.used >= usage.used + 8 * MIB
        assert after.available < usage.available


@case(243, CREATE, STATS, BLOCK)
@must("VolumeUsage", "total is the total capacity")
@beyond("NodeGetVolumeStats", "a block device has no inodes")
def test_stats_of_a_device_are_its_size(co: Co) -> None:
    """NodeGetVolumeStats: the total of a raw volume is the device's size, and there are no inodes."""
    volume = co.volume(block())
    target = co.use(volume, block())
    stats = _stats(co, volume, str(target))
    size = co.host.size_bytes(target)
    assert _Unit.BYTES not in stats or stats[_Unit.BYTES].total == size
    with co.beyond():
        assert _Unit.BYTES in stats, "the size is missing"
        assert _Unit.INODES not in stats, "inodes of a device"


@case(244, CREATE, STATS, "node.VOLUME_CONDITION", "profile.1.12")
@must(
    "NodeGetVolumeStats",
    "volume_condition MUST be specified with VOLUME_CONDITION; its message is REQUIRED",
)
@beyond("VolumeCondition", "a new volume is normal")
def test_stats_have_condition_of_new_volume(co: Co) -> None:
    """NodeGetVolumeStats of CSI 1.12: a condition with a message; a new volume is not abnormal."""
    volume = co.volume()
    target = co.use(volume)
    request = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume.volume_id, volume_path=str(target))
    condition = co.ask(co.node.NodeGetVolumeStats, request).volume_condition
    assert condition.message, "there is no message"
    with co.beyond():
        assert not condition.abnormal, condition.message


@case(251, CREATE, NODE_EXPAND)
@must(
    "NodeExpandVolume Errors",
    "a volume that does not exist MUST be NOT_FOUND; volume_id and volume_path are REQUIRED",
)
def test_node_expand_needs_a_volume_and_its_path(co: Co) -> None:
    """NodeExpandVolume: INVALID_ARGUMENT without one of them; NOT_FOUND for no such volume."""
    volume = co.volume()
    target = co.use(volume)
    request = csi_pb2.NodeExpandVolumeRequest
    call = co.node.NodeExpandVolume
    co.refused(call, request(volume_path=str(target)), Code.INVALID_ARGUMENT)
    co.refused(call, request(volume_id=volume.volume_id), Code.INVALID_ARGUMENT)
    unknown = request(volume_id=UNKNOWN_VOLUME, volume_path=str(target))
    co.refused(call, unknown, Code.NOT_FOUND)


@case(252, CREATE, EXPAND, NODE_EXPAND, "plugin.ONLINE")
@must(
    "VolumeExpansion",
    "with ONLINE the plugin MUST support expansion of published volumes; the volume MUST be "
    "at least required_bytes",
)
def test_a_filesystem_grows_while_it_is_used(co: Co) -> None:
    """ControllerExpandVolume, NodeExpandVolume: a published filesystem is larger afterwards, if it is the volume's
    own, and keeps its files; OK again.
    """
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", b"kept")
    sized, before = expansion.has_its_own_size(co, volume, target), co.host.size_bytes(target)
    size = 2 * (volume.capacity_bytes or co.options.parameters.size_bytes)
    for _ in range(2):
        reported = _expand(co, volume, str(target), size, co.mount)
        assert not reported or reported >= size  # NodeExpandVolume may leave it out
    assert not sized or co.host.size_bytes(target) >= 1.6 * before, "the filesystem has not grown"
    assert co.host.read(target / "file", 99) == b"kept"


@case(253, CREATE, EXPAND, NODE_EXPAND, "plugin.ONLINE", BLOCK)
@must(
    "VolumeExpansion",
    "with ONLINE the plugin MUST support expansion of published volumes; the volume MUST be "
    "at least required_bytes",
)
def test_a_device_grows_while_it_is_used(co: Co) -> None:
    """NodeExpandVolume: a published device has the new size afterwards."""
    volume = co.volume(block())
    target = co.use(volume, block())
    size = 2 * co.host.size_bytes(target)
    _expand(co, volume, str(target), size, block())
    assert co.host.size_bytes(target) >= size


@case(254, CREATE, EXPAND, NODE_EXPAND)
@must("ControllerExpandVolume, NodeExpandVolume", "the volume MUST be at least required_bytes")
def test_a_filesystem_that_grew_offline_is_grown_when_published(co: Co) -> None:
    """ControllerExpandVolume of an unused volume: after stage, publish and NodeExpandVolume the filesystem has the
    size, if it is the volume's own.
    """
    volume = co.volume()
    target = co.use(volume)
    sized, before = expansion.has_its_own_size(co, volume, target), co.host.size_bytes(target)
    co.release(volume, target)
    size = 2 * (volume.capacity_bytes or co.options.parameters.size_bytes)
    _expand_controller(co, volume, size, co.mount)
    target = co.use(volume)
    _expand_node(co, volume, str(target), size, co.mount)
    assert not sized or co.host.size_bytes(target) >= 1.6 * before, "the filesystem has not grown"


@case(255, CREATE, NODE_EXPAND, CHECKS_FS_TYPE)
@beyond(
    "NodeExpandVolume Errors",
    "OUT_OF_RANGE, INVALID_ARGUMENT and NOT_FOUND for arguments that do not fit; each of "
    "them is OPTIONAL, or the CO's duty",
)
def test_node_expand_with_impossible_arguments_is_refused(co: Co) -> None:
    """NodeExpandVolume: NOT_FOUND at a path without the volume, OUT_OF_RANGE for more than its size,
    INVALID_ARGUMENT for a capability that it cannot have.
    """
    volume = co.volume()
    target = co.use(volume)
    call = co.node.NodeExpandVolume
    request = csi_pb2.NodeExpandVolumeRequest(
        volume_id=volume.volume_id,
        volume_path=str(co.target()),
        staging_target_path=str(co.staging(volume)),
        volume_capability=co.mount,
    )
    co.refused(call, request, Code.NOT_FOUND)
    request.volume_path = str(target)
    request.volume_capability.CopyFrom(mount(NO_FILESYSTEM))
    co.refused(call, request, Code.INVALID_ARGUMENT)
    request.volume_capability.CopyFrom(co.mount)
    request.capacity_range.required_bytes = 1 << 50
    co.refused(call, request, Code.OUT_OF_RANGE)


@case(261, CREATE, "node.GET_VOLUME_HEALTH")
@must(
    "NodeGetVolumeHealth (CSI 1.13)",
    "a volume that does not exist is NOT_FOUND; volume_id is REQUIRED",
)
@beyond("NodeGetVolumeHealth (CSI 1.13)", "a new volume has nothing wrong")
def test_node_health_of_new_volume_is_healthy(co: Co) -> None:
    """NodeGetVolumeHealth: nothing wrong with a new volume; NOT_FOUND for no such volume."""
    volume = co.volume()
    target = co.use(volume)
    request = csi_pb2.NodeGetVolumeHealthRequest
    call = co.node.NodeGetVolumeHealth
    asked = request(volume_id=volume.volume_id, volume_publish_path=str(target))
    health = co.ask(call, asked).volume_health
    assert health.volume_id == volume.volume_id
    with co.beyond():
        assert not list(health.health_statuses)
    unknown = request(volume_id=UNKNOWN_VOLUME, volume_publish_path=str(target))
    co.refused(call, unknown, Code.NOT_FOUND)
    co.refused(call, request(volume_publish_path=str(target)), Code.INVALID_ARGUMENT)


@case(262, "node.GET_STORAGE_HEALTH")
@beyond("NodeGetStorageHealth (CSI 1.13)", "an entry says what is wrong")
def test_storage_health_entries_have_a_status(co: Co) -> None:
    """NodeGetStorageHealth: answered; every entry says what is wrong."""
    request = csi_pb2.NodeGetStorageHealthRequest()
    for each in co.ask(co.node.NodeGetStorageHealth, request).backend_health:
        assert each.status, "an entry of status 0 says nothing"


def _stats(co: Co, volume: csi_pb2.Volume, path: str) -> dict[int, csi_pb2.VolumeUsage]:
    request = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume.volume_id, volume_path=path)
    return {each.unit: each for each in co.ask(co.node.NodeGetVolumeStats, request).usage}


def _expand(
    co: Co, volume: csi_pb2.Volume, path: str, size: int, capability: csi_pb2.VolumeCapability
) -> int:
    answer = _expand_controller(co, volume, size, capability)
    if not answer.node_expansion_required:
        return answer.capacity_bytes
    return _expand_node(co, volume, path, size, capability)


def _expand_controller(
    co: Co, volume: csi_pb2.Volume, size: int, capability: csi_pb2.VolumeCapability
) -> csi_pb2.ControllerExpandVolumeResponse:
    request = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(required_bytes=size),
        volume_capability=capability,
        secrets=co.options.parameters.secrets,
    )
    return co.until_final(co.controller.ControllerExpandVolume, request)


def _expand_node(
    co: Co, volume: csi_pb2.Volume, path: str, size: int, capability: csi_pb2.VolumeCapability
) -> int:
    request = csi_pb2.NodeExpandVolumeRequest(
        volume_id=volume.volume_id,
        volume_path=path,
        staging_target_path=str(co.staging(volume)),
        capacity_range=csi_pb2.CapacityRange(required_bytes=size),
        volume_capability=capability,
    )
    return co.until_final(co.node.NodeExpandVolume, request).capacity_bytes
