"""NodeGetVolumeStats, NodeExpandVolume (C-241 to C-255)."""

from pathlib import Path

from crust.wire.csi.v1 import csi_pb2
from crust.wire.csi.v1.csi_pb2 import Volume, VolumeCapability
from crust_conformance.options import MIB
from crust_conformance.orchestrator import expansion
from crust_conformance.orchestrator.calls import Code
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, block, mount

_Unit = csi_pb2.VolumeUsage


def test_c241_stats_need_a_volume_and_its_path(co: Co) -> None:
    request = _stats_request(*co.used())
    co.refused_without(request, "volume_id", "volume_path")
    co.refused_with_unknown(request, "volume_id")
    request.volume_path = str(co.target())
    co.answered(request, Code.NOT_FOUND)


def test_c242_stats_of_a_filesystem_follow_its_use(co: Co) -> None:
    volume, target = co.used()
    stats = _stats(co, volume, target)
    for entry in stats.values():
        assert entry.unit != _Unit.UNKNOWN, "an entry without a unit"
        assert min(entry.total, entry.used, entry.available) >= 0, f"a negative value: {entry}"
    with co.beyond():
        assert {_Unit.BYTES, _Unit.INODES} <= set(stats), "bytes or inodes are missing"
        usage = stats[_Unit.BYTES]
        assert 0 < usage.used + usage.available <= usage.total
        if not expansion.has_its_own_size(co, volume, target):
            return  # others write to the same filesystem
        co.host.write(target / "file", b"x" * (8 * MIB))
        later = _stats(co, volume, target)[_Unit.BYTES]
        assert later.used >= usage.used + 8 * MIB
        assert later.available < usage.available


def test_c243_stats_of_a_device_are_its_size(co: Co) -> None:
    volume, target = co.used(block())
    stats = _stats(co, volume, target)
    size = co.host.size_bytes(target)
    assert _Unit.BYTES not in stats or stats[_Unit.BYTES].total == size
    with co.beyond():
        assert _Unit.BYTES in stats, "the size is missing"
        assert _Unit.INODES not in stats, "inodes of a device"


def test_c244_stats_have_condition_of_new_volume(co: Co) -> None:
    condition = co.ask(_stats_request(*co.used())).volume_condition
    assert condition.message, "there is no message"
    with co.beyond():
        assert not condition.abnormal, condition.message


def test_c251_node_expand_needs_a_volume_and_its_path(co: Co) -> None:
    request = expansion.node_request(co, *co.used())
    co.refused_without(request, "volume_id", "volume_path")
    co.refused_with_unknown(request, "volume_id")


def test_c252_a_filesystem_grows_while_it_is_used(co: Co) -> None:
    volume, target = co.used(file=b"kept")
    sized, initial = expansion.has_its_own_size(co, volume, target), co.host.size_bytes(target)
    size = expansion.doubled(co, volume)
    for _ in range(2):
        reported = _expand(co, volume, target, size, co.mount)
        assert not reported or reported >= size  # NodeExpandVolume may leave it out
    assert not sized or co.host.size_bytes(target) >= 1.6 * initial, "the filesystem has not grown"
    assert co.file(target) == b"kept"


def test_c253_a_device_grows_while_it_is_used(co: Co) -> None:
    volume, target = co.used(block())
    size = 2 * co.host.size_bytes(target)
    _expand(co, volume, target, size, block())
    assert co.host.size_bytes(target) >= size


def test_c254_a_filesystem_that_grew_offline_is_grown_when_published(co: Co) -> None:
    volume, target = co.used()
    sized, initial = expansion.has_its_own_size(co, volume, target), co.host.size_bytes(target)
    co.release(volume, target)
    co.until_final(expansion.controller_request(co, volume))
    target = co.use(volume)
    co.until_final(expansion.node_request(co, volume, target))
    assert not sized or co.host.size_bytes(target) >= 1.6 * initial, "the filesystem has not grown"


def test_c255_node_expand_with_impossible_arguments_is_refused(co: Co) -> None:
    volume, target = co.used()
    request = expansion.node_request(co, volume, co.target())
    request.ClearField("capacity_range")  # so that the path alone does not fit
    co.answered(request, Code.NOT_FOUND)
    request.volume_path = str(target)
    request.volume_capability.CopyFrom(mount(NO_FILESYSTEM))
    co.answered(request, Code.INVALID_ARGUMENT)
    request.volume_capability.CopyFrom(co.mount)
    request.capacity_range.required_bytes = 1 << 50
    co.answered(request, Code.OUT_OF_RANGE)


def _stats_request(volume: Volume, target: Path) -> csi_pb2.NodeGetVolumeStatsRequest:
    return csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume.volume_id, volume_path=str(target))


def _stats(co: Co, volume: Volume, target: Path) -> dict[int, csi_pb2.VolumeUsage]:
    return {usage.unit: usage for usage in co.ask(_stats_request(volume, target)).usage}


def _expand(co: Co, volume: Volume, target: Path, size: int, capability: VolumeCapability) -> int:
    answer = co.until_final(expansion.controller_request(co, volume, size, capability))
    if answer.node_expansion_required:
        answer = co.until_final(expansion.node_request(co, volume, target, size, capability))
    return answer.capacity_bytes
