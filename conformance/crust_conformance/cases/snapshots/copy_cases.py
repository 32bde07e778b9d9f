"""The content of restores and clones, by checksums, on every filesystem and on raw devices (C-305 to C-316)."""

from pathlib import Path

from crust.wire.csi.v1 import csi_pb2
from crust.wire.csi.v1.csi_pb2 import Volume, VolumeCapability
from crust_conformance.orchestrator import copies, expansion
from crust_conformance.orchestrator.calls import Code, Refusal, check_code
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.volume_capabilities import block


def test_c305_restored_filesystem_has_content_of_snapshot(co: Co) -> None:
    for capability in co.filesystems:
        volume, target = co.used(capability, file=copies.noise(1))
        snapshot = copies.snapshot(co, volume.volume_id)
        co.host.write(target / "file", copies.noise(2))
        restored = co.volume(capability, source=copies.of_snapshot(snapshot.snapshot_id))
        beside = co.use(restored, capability)
        assert _file(co, beside) == copies.checksum(copies.noise(1))
        assert _file(co, target) == copies.checksum(copies.noise(2))


def test_c306_restored_device_has_content_of_snapshot(co: Co) -> None:
    volume, target = co.used(block())
    _scatter(co, target, 1)
    checksum = _device(co, target)
    snapshot, target = copies.of_device(co, volume, target)
    _scatter(co, target, 2)
    restored = co.volume(block(), source=copies.of_snapshot(snapshot.snapshot_id))
    with co.beyond():
        assert restored.content_source.snapshot.snapshot_id == snapshot.snapshot_id
    assert _device(co, co.use(restored, block())) == checksum


def test_c307_larger_restore_has_larger_filesystem(co: Co) -> None:
    for capability in co.filesystems:
        volume, target = co.used(capability)
        size, snapshot = co.host.size_bytes(target), copies.snapshot(co, volume.volume_id)
        _check_grows(co, volume, capability, size, copies.of_snapshot(snapshot.snapshot_id))


def test_c309_delete_of_volume_with_snapshots_is_refused_or_snapshot_survives(co: Co) -> None:
    volume, target = co.used(file=copies.noise(3))
    snapshot = copies.snapshot(co, volume.volume_id)
    co.release(volume, target)
    request = co.delete_request(volume.volume_id)
    co.answered(request, Code.OK, Code.FAILED_PRECONDITION)
    restored = co.volume(source=copies.of_snapshot(snapshot.snapshot_id))
    assert _file(co, co.use(restored)) == copies.checksum(copies.noise(3))


def test_c311_clone_is_independent_of_its_source(co: Co) -> None:
    for capability in co.filesystems:
        volume, target = co.used(capability, file=copies.noise(4))
        clone = co.volume(capability, source=copies.of_volume(volume.volume_id))
        with co.beyond():
            assert clone.content_source.volume.volume_id == volume.volume_id
        beside = co.use(clone, capability)
        assert _file(co, beside) == copies.checksum(copies.noise(4))
        co.host.write(beside / "file", copies.noise(5))
        co.host.write(target / "file", copies.noise(6))
        assert _file(co, beside) == copies.checksum(copies.noise(5))
        assert _file(co, target) == copies.checksum(copies.noise(6))


def test_c313_delete_of_restored_snapshot_is_refused_or_volume_survives(co: Co) -> None:
    volume, _ = co.used(file=copies.noise(7))
    snapshot = copies.snapshot(co, volume.volume_id)
    restored = co.volume(source=copies.of_snapshot(snapshot.snapshot_id))
    request = csi_pb2.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id)
    co.answered(request, Code.OK, Code.FAILED_PRECONDITION)
    assert _file(co, co.use(restored)) == copies.checksum(copies.noise(7))


def test_c314_larger_clone_has_larger_filesystem(co: Co) -> None:
    for capability in co.filesystems:
        volume, target = co.used(capability)
        size = co.host.size_bytes(target)
        _check_grows(co, volume, capability, size, copies.of_volume(volume.volume_id))


def test_c315_cloned_device_has_content_of_source(co: Co) -> None:
    volume, target = co.used(block())
    _scatter(co, target, 3)
    checksum = _device(co, target)
    clone, target = copies.clone_device(co, volume, target)
    beside = co.use(clone, block())
    assert _device(co, beside) == checksum
    _scatter(co, beside, 4)
    assert _device(co, target) == checksum


def test_c316_clone_of_restored_volume_survives_deletion_of_its_sources(co: Co) -> None:
    volume, target = co.used(file=copies.noise(8))
    snapshot = copies.snapshot(co, volume.volume_id)
    restored = co.volume(source=copies.of_snapshot(snapshot.snapshot_id))
    beside = co.use(restored)
    clone = co.volume(source=copies.of_volume(restored.volume_id))
    co.release(restored, beside)
    co.release(volume, target)
    co.outcome(csi_pb2.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id))
    for source in (restored, volume):
        request = co.delete_request(source.volume_id)
        co.outcome(request)
    assert _file(co, co.use(clone)) == copies.checksum(copies.noise(8))


def _check_grows(
    co: Co,
    volume: Volume,
    capability: VolumeCapability,
    size_before: int,
    source: csi_pb2.VolumeContentSource,
) -> None:
    """A copy of half the size is refused; a copy of twice the size is refused, or its filesystem grows."""
    size = volume.capacity_bytes or co.options.parameters.size_bytes
    if volume.capacity_bytes:  # an unknown size has no smaller one
        smaller = co.create_request(capability, size_bytes=size // 2, source=source)
        smaller.capacity_range.limit_bytes = size // 2
        co.answered(smaller, Code.OUT_OF_RANGE)
    larger = co.create_request(capability, size_bytes=2 * size, source=source)
    reply = co.reply(larger)
    if isinstance(reply, Refusal):
        check_code(larger, reply.code, Code.OK, Code.OUT_OF_RANGE)
        return
    target = co.use(reply.volume, capability)
    shared = size_before >= 2 * size
    if not shared and co.host.size_bytes(target) < 1.6 * size_before:
        request = expansion.node_request(co, reply.volume, target, 2 * size, capability)
        co.answered(request, Code.FAILED_PRECONDITION)


def _file(co: Co, target: Path) -> str:
    return copies.checksum(co.file(target))


def _device(co: Co, target: Path) -> str:
    return copies.checksum_of(co, target)


def _scatter(co: Co, target: Path, seed: int) -> None:
    size = co.host.size_bytes(target)
    for part in range(4):
        offset = size // 4 * part // 4096 * 4096
        co.host.write(target, copies.noise(10 * seed + part), offset=offset)
