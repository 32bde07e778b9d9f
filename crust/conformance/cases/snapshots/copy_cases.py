"""The content of restores and clones, by checksums, on every filesystem and on raw devices (C-305 to C-316)."""

from pathlib import Path

from crust.conformance.case import BLOCK, CLONE, CREATE, NODE, SNAPSHOT, beyond, case, must
from crust.conformance.options import MIB
from crust.conformance.orchestrator import copies, expansion
from crust.conformance.orchestrator.calls import Code, Refusal
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import block
from crust.wire.csi.v1 import csi_pb2


@case(305, CREATE, SNAPSHOT, NODE)
@must("CreateVolume", "the plugin MUST provide a volume that contains the data of the snapshot")
def test_restored_filesystem_has_content_of_snapshot(co: Co) -> None:
    """CreateVolume from a snapshot: the files as they were, whatever was written since; mounted beside its
    source; on every filesystem.
    """
    for capability in co.filesystems:
        volume = co.volume(capability)
        target = co.use(volume, capability)
        co.host.write(target / "file", copies.noise(1))
        made = copies.snapshot(co, volume.volume_id)
        co.host.write(target / "file", copies.noise(2))
        restored = co.volume(capability, source=copies.of_snapshot(made.snapshot_id))
        beside = co.use(restored, capability)
        assert _file(co, beside) == copies.checksum(copies.noise(1))
        assert _file(co, target) == copies.checksum(copies.noise(2))


@case(306, CREATE, SNAPSHOT, NODE, BLOCK)
@must("CreateVolume", "the plugin MUST provide a volume that contains the data of the snapshot")
@beyond("Volume", "content_source is OPTIONAL; external-provisioner expects it")
def test_restored_device_has_content_of_snapshot(co: Co) -> None:
    """CreateVolume from a snapshot: the whole device, byte for byte."""
    volume = co.volume(block())
    target = co.use(volume, block())
    _scatter(co, target, 1)
    before = _device(co, target)
    made, target = copies.of_device(co, volume, target)
    _scatter(co, target, 2)
    restored = co.volume(block(), source=copies.of_snapshot(made.snapshot_id))
    with co.beyond():
        assert restored.content_source.snapshot.snapshot_id == made.snapshot_id
    assert _device(co, co.use(restored, block())) == before


@case(307, CREATE, SNAPSHOT, NODE)
@must(
    "CreateVolume",
    "a larger volume MUST have the requested size when it is published, or be refused with "
    "OUT_OF_RANGE; a smaller one MUST be OUT_OF_RANGE",
)
def test_larger_restore_has_larger_filesystem(co: Co) -> None:
    """CreateVolume from a snapshot: larger than it is OUT_OF_RANGE, or every filesystem is grown when it is
    published (or NodeExpandVolume is FAILED_PRECONDITION); smaller is OUT_OF_RANGE.
    """
    for capability in co.filesystems:
        volume = co.volume(capability)
        target = co.use(volume, capability)
        before, source = co.host.size_bytes(target), copies.snapshot(co, volume.volume_id)
        _check_grows(co, volume, capability, before, copies.of_snapshot(source.snapshot_id))


@case(309, CREATE, SNAPSHOT, NODE)
@must(
    "DeleteVolume",
    "snapshots MUST still be fully operational after their volume is deleted, or that MUST "
    "be FAILED_PRECONDITION",
)
def test_delete_of_volume_with_snapshots_is_refused_or_snapshot_survives(co: Co) -> None:
    """DeleteVolume with snapshots: FAILED_PRECONDITION, or OK and the snapshot can still be restored."""
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", copies.noise(3))
    made = copies.snapshot(co, volume.volume_id)
    co.release(volume, target)
    request = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
    code, _ = co.outcome(co.controller.DeleteVolume, request)
    assert code in (Code.OK, Code.FAILED_PRECONDITION), code
    restored = co.volume(source=copies.of_snapshot(made.snapshot_id))
    assert _file(co, co.use(restored)) == copies.checksum(copies.noise(3))


@case(311, CREATE, CLONE, NODE)
@must(
    "CreateVolume",
    "the plugin MUST provide a volume that contains the data of the original volume",
)
@beyond("Volume", "content_source is OPTIONAL; external-provisioner expects it")
def test_clone_is_independent_of_its_source(co: Co) -> None:
    """CLONE_VOLUME: the source's files, mounted beside it, and neither sees what is written to the other; on
    every filesystem.
    """
    for capability in co.filesystems:
        volume = co.volume(capability)
        target = co.use(volume, capability)
        co.host.write(target / "file", copies.noise(4))
        clone = co.volume(capability, source=copies.of_volume(volume.volume_id))
        with co.beyond():
            assert clone.content_source.volume.volume_id == volume.volume_id
        beside = co.use(clone, capability)
        assert _file(co, beside) == copies.checksum(copies.noise(4))
        co.host.write(beside / "file", copies.noise(5))
        co.host.write(target / "file", copies.noise(6))
        assert _file(co, beside) == copies.checksum(copies.noise(5))
        assert _file(co, target) == copies.checksum(copies.noise(6))


@case(313, CREATE, SNAPSHOT, NODE)
@must(
    "DeleteSnapshot Errors",
    "a snapshot that could not be deleted because it is in use MUST be FAILED_PRECONDITION",
)
def test_delete_of_restored_snapshot_is_refused_or_volume_survives(co: Co) -> None:
    """DeleteSnapshot of what a volume was made of: FAILED_PRECONDITION, or OK, and the volume is intact."""
    volume = co.volume()
    co.host.write(co.use(volume) / "file", copies.noise(7))
    made = copies.snapshot(co, volume.volume_id)
    restored = co.volume(source=copies.of_snapshot(made.snapshot_id))
    request = csi_pb2.DeleteSnapshotRequest(snapshot_id=made.snapshot_id)
    code, _ = co.outcome(co.controller.DeleteSnapshot, request)
    assert code in (Code.OK, Code.FAILED_PRECONDITION), code
    assert _file(co, co.use(restored)) == copies.checksum(copies.noise(7))


@case(314, CREATE, CLONE, NODE)
@must(
    "CreateVolume",
    "a larger volume MUST have the requested size when it is published, or be refused with "
    "OUT_OF_RANGE; a smaller one MUST be OUT_OF_RANGE",
)
def test_larger_clone_has_larger_filesystem(co: Co) -> None:
    """CLONE_VOLUME: larger than its source is OUT_OF_RANGE, or every filesystem is grown when it is published (or
    NodeExpandVolume is FAILED_PRECONDITION); smaller is OUT_OF_RANGE.
    """
    for capability in co.filesystems:
        volume = co.volume(capability)
        target = co.use(volume, capability)
        before = co.host.size_bytes(target)
        _check_grows(co, volume, capability, before, copies.of_volume(volume.volume_id))


@case(315, CREATE, CLONE, NODE, BLOCK)
@must(
    "CreateVolume",
    "the plugin MUST provide a volume that contains the data of the original volume",
)
def test_cloned_device_has_content_of_source(co: Co) -> None:
    """CLONE_VOLUME: the whole device, byte for byte, and neither sees what is written to the other."""
    volume = co.volume(block())
    target = co.use(volume, block())
    _scatter(co, target, 3)
    before = _device(co, target)
    clone, target = copies.clone_device(co, volume, target)
    beside = co.use(clone, block())
    assert _device(co, beside) == before
    _scatter(co, beside, 4)
    assert _device(co, target) == before


@case(316, CREATE, SNAPSHOT, CLONE, NODE)
@must("CreateVolume", "the plugin MUST provide a volume that contains the data of its source")
def test_clone_of_restored_volume_survives_deletion_of_its_sources(co: Co) -> None:
    """CLONE_VOLUME of a restored volume: its files are intact after snapshot, source and restored volume are
    deleted, where the driver allows it.
    """
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", copies.noise(8))
    made = copies.snapshot(co, volume.volume_id)
    restored = co.volume(source=copies.of_snapshot(made.snapshot_id))
    beside = co.use(restored)
    clone = co.volume(source=copies.of_volume(restored.volume_id))
    co.release(restored, beside)
    co.release(volume, target)
    co.outcome(
        co.controller.DeleteSnapshot, csi_pb2.DeleteSnapshotRequest(snapshot_id=made.snapshot_id)
    )
    for each in (restored, volume):
        request = csi_pb2.DeleteVolumeRequest(volume_id=each.volume_id)
        co.outcome(co.controller.DeleteVolume, request)
    assert _file(co, co.use(clone)) == copies.checksum(copies.noise(8))


def _check_grows(
    co: Co,
    volume: csi_pb2.Volume,
    capability: csi_pb2.VolumeCapability,
    before: int,
    source: csi_pb2.VolumeContentSource,
) -> None:
    size = volume.capacity_bytes or co.options.parameters.size_bytes
    _check_larger(co, capability, before, source, size)
    if not volume.capacity_bytes:  # unknown, so that nothing is smaller
        return
    smaller = co.create_request(capability, size_bytes=size // 2, source=source)
    smaller.capacity_range.limit_bytes = size // 2
    co.refused(co.controller.CreateVolume, smaller, Code.OUT_OF_RANGE)


def _check_larger(
    co: Co,
    capability: csi_pb2.VolumeCapability,
    before: int,
    source: csi_pb2.VolumeContentSource,
    size: int,
) -> None:
    wanted = co.create_request(capability, size_bytes=2 * size, source=source)
    reply = co.reply(co.controller.CreateVolume, wanted)
    if isinstance(reply, Refusal):
        assert reply.code is Code.OUT_OF_RANGE, str(reply)
        return
    larger = reply.volume
    target = co.use(larger, capability)
    shared = before >= 2 * size
    if shared or co.host.size_bytes(target) >= 1.6 * before:
        return
    request = expansion.node_request(co, larger, target)
    request.capacity_range.required_bytes = 2 * size
    request.volume_capability.CopyFrom(capability)
    co.refused(co.node.NodeExpandVolume, request, Code.FAILED_PRECONDITION)


def _file(co: Co, target: Path) -> str:
    return copies.checksum(co.host.read(target / "file", MIB))


def _device(co: Co, target: Path) -> str:
    return copies.checksum_of(co, target)


def _scatter(co: Co, target: Path, seed: int) -> None:
    size = co.host.size_bytes(target)
    for part in range(4):
        offset = size // 4 * part // 4096 * 4096
        co.host.write(target, copies.noise(10 * seed + part), offset=offset)
