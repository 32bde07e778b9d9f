"""Snapshots, restores and clones, by checksums (C-301 to C-325)."""

from pathlib import Path

from crust.conformance import copies
from crust.conformance.case import (
    BLOCK,
    CLONE,
    CREATE,
    GET_SNAPSHOT,
    LIST_SNAPSHOTS,
    NODE,
    SNAPSHOT,
    case,
)
from crust.conformance.co import Co, Code, block
from crust.conformance.options import MIB
from crust.wire.csi.v1 import csi_pb2

_UNKNOWN = "conformance-no-such-thing"


@case(301, CREATE, SNAPSHOT)
def test_a_snapshot_needs_a_name_and_a_source(co: Co) -> None:
    """CreateSnapshot: INVALID_ARGUMENT without one of them; NOT_FOUND for no such volume."""
    volume = co.volume()
    call = co.controller.CreateSnapshot
    for field in ("source_volume_id", "name"):
        request = copies.snapshot_request(co, volume.volume_id)
        request.ClearField(field)
        co.refused(call, request, Code.INVALID_ARGUMENT)
    co.refused(call, copies.snapshot_request(co, _UNKNOWN), Code.NOT_FOUND)


@case(302, CREATE, SNAPSHOT)
def test_a_snapshot_is_made_once(co: Co) -> None:
    """CreateSnapshot: the same again is the same snapshot, with id, source, time and size."""
    volume = co.volume()
    request = copies.snapshot_request(co, volume.volume_id)
    first, again = copies.take(co, request), copies.take(co, request)
    assert first == again
    assert first.snapshot_id
    assert first.source_volume_id == volume.volume_id
    assert first.creation_time.seconds > 0
    assert first.size_bytes >= 0
    other = co.volume()
    request.source_volume_id = other.volume_id
    co.refused(co.controller.CreateSnapshot, request, Code.ALREADY_EXISTS)


@case(303, SNAPSHOT)
def test_a_snapshot_is_deleted_once_and_again(co: Co) -> None:
    """DeleteSnapshot: OK for no such snapshot; INVALID_ARGUMENT without an id."""
    copies.delete(co, _UNKNOWN)
    request = csi_pb2.DeleteSnapshotRequest()
    co.refused(co.controller.DeleteSnapshot, request, Code.INVALID_ARGUMENT)


@case(304, CREATE, SNAPSHOT)
def test_a_snapshot_may_have_any_name(co: Co) -> None:
    """Size Limits: snapshot names of any Unicode and of 128 bytes; INVALID_ARGUMENT above, and for control
    characters.
    """
    volume = co.volume()
    stem = co.name("")
    names = [f"{each}{stem}" for each in ("a/b", "..", "ü", "🦀")] + [stem.ljust(128, "x")]
    made = [
        copies.take(co, copies.snapshot_request(co, volume.volume_id, name=name)) for name in names
    ]
    assert len({each.snapshot_id for each in made}) == len(names)
    for bad in (stem.ljust(129, "x"), f"a\x07{stem}"):
        request = copies.snapshot_request(co, volume.volume_id, name=bad)
        co.refused(co.controller.CreateSnapshot, request, Code.INVALID_ARGUMENT)


@case(305, CREATE, SNAPSHOT, NODE)
def test_a_restored_filesystem_is_the_one_of_the_snapshot(co: Co) -> None:
    """CreateVolume from a snapshot: the files as they were, whatever was written since; mounted beside its
    source.
    """
    for fs_type in co.options.parameters.fs_types:
        capability = csi_pb2.VolumeCapability()
        capability.CopyFrom(co.mount)
        capability.mount.fs_type = fs_type
        volume = co.volume(capability)
        target = co.use(volume, capability)
        co.sight.write(target / "file", copies.noise(1))
        made = copies.snapshot(co, volume.volume_id)
        co.sight.write(target / "file", copies.noise(2))
        restored = co.volume(capability, source=copies.of_snapshot(made.snapshot_id))
        beside = co.use(restored, capability)
        assert _file(co, beside) == copies.checksum(copies.noise(1))
        assert _file(co, target) == copies.checksum(copies.noise(2))


@case(306, CREATE, SNAPSHOT, NODE, BLOCK)
def test_a_restored_device_is_the_one_of_the_snapshot(co: Co) -> None:
    """CreateVolume from a snapshot: the whole device, byte for byte."""
    volume = co.volume(block())
    target = co.use(volume, block())
    _scatter(co, target, 1)
    before = _device(co, target)
    made = copies.snapshot(co, volume.volume_id)
    _scatter(co, target, 2)
    restored = co.volume(block(), source=copies.of_snapshot(made.snapshot_id))
    assert restored.content_source.snapshot.snapshot_id == made.snapshot_id
    assert _device(co, co.use(restored, block())) == before


@case(307, CREATE, SNAPSHOT, NODE)
def test_a_larger_restore_is_larger_inside(co: Co) -> None:
    """CreateVolume from a snapshot: larger than it, the filesystem is grown when it is published; smaller
    is OUT_OF_RANGE.
    """
    volume = co.volume()
    target = co.use(volume)
    size = volume.capacity_bytes or co.options.parameters.size_bytes
    before = co.sight.size_bytes(target)
    made = copies.snapshot(co, volume.volume_id)
    source = copies.of_snapshot(made.snapshot_id)
    larger = co.volume(size_bytes=2 * size, source=source)
    assert co.sight.size_bytes(co.use(larger)) >= 1.6 * before
    smaller = co.create_request(size_bytes=size // 2, source=source)
    smaller.capacity_range.limit_bytes = size // 2
    co.refused(co.controller.CreateVolume, smaller, Code.OUT_OF_RANGE)


@case(308, CREATE, SNAPSHOT)
def test_a_source_that_is_not_there_is_not_found(co: Co) -> None:
    """CreateVolume: NOT_FOUND for no such snapshot."""
    request = co.create_request(source=copies.of_snapshot(_UNKNOWN))
    co.refused(co.controller.CreateVolume, request, Code.NOT_FOUND)


@case(309, CREATE, SNAPSHOT, NODE)
def test_a_snapshot_outlives_its_volume_or_keeps_it(co: Co) -> None:
    """DeleteVolume with snapshots: FAILED_PRECONDITION, or OK and the snapshot can still be restored."""
    volume = co.volume()
    target = co.use(volume)
    co.sight.write(target / "file", copies.noise(3))
    made = copies.snapshot(co, volume.volume_id)
    co.release(volume, target)
    request = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
    code, _ = co.outcome(co.controller.DeleteVolume, request)
    assert code in (Code.OK, Code.FAILED_PRECONDITION), code
    restored = co.volume(source=copies.of_snapshot(made.snapshot_id))
    assert _file(co, co.use(restored)) == copies.checksum(copies.noise(3))


@case(310, CREATE, SNAPSHOT)
def test_the_source_is_part_of_what_a_volume_is(co: Co) -> None:
    """CreateVolume: the same name without the snapshot, or with another, is ALREADY_EXISTS."""
    volume = co.volume()
    one, other = (copies.snapshot(co, volume.volume_id) for _ in range(2))
    request = co.create_request(source=copies.of_snapshot(one.snapshot_id))
    co.create(request)
    for source in (copies.of_snapshot(other.snapshot_id), None):
        again = co.create_request(name=request.name, source=source)
        co.refused(co.controller.CreateVolume, again, Code.ALREADY_EXISTS)


@case(311, CREATE, CLONE, NODE)
def test_a_clone_is_a_copy_and_a_volume_of_its_own(co: Co) -> None:
    """CLONE_VOLUME: the source's files, mounted beside it, and neither sees what is written to the other."""
    volume = co.volume()
    target = co.use(volume)
    co.sight.write(target / "file", copies.noise(4))
    clone = co.volume(source=copies.of_volume(volume.volume_id))
    assert clone.content_source.volume.volume_id == volume.volume_id
    beside = co.use(clone)
    assert _file(co, beside) == copies.checksum(copies.noise(4))
    co.sight.write(beside / "file", copies.noise(5))
    co.sight.write(target / "file", copies.noise(6))
    assert _file(co, beside) == copies.checksum(copies.noise(5))
    assert _file(co, target) == copies.checksum(copies.noise(6))


@case(312, CREATE, CLONE)
def test_a_clone_needs_its_source_and_its_size(co: Co) -> None:
    """CLONE_VOLUME: NOT_FOUND for no such volume; OUT_OF_RANGE for less than the source has."""
    volume = co.volume(size_bytes=2 * co.options.parameters.size_bytes)
    call = co.controller.CreateVolume
    co.refused(call, co.create_request(source=copies.of_volume(_UNKNOWN)), Code.NOT_FOUND)
    smaller = co.create_request(source=copies.of_volume(volume.volume_id))
    smaller.capacity_range.limit_bytes = smaller.capacity_range.required_bytes
    co.refused(call, smaller, Code.OUT_OF_RANGE)


@case(321, CREATE, SNAPSHOT, LIST_SNAPSHOTS)
def test_snapshots_are_listed_by_source_and_by_id(co: Co) -> None:
    """ListSnapshots: all, of a volume, or one; a filter that meets nothing is an empty list."""
    one, other = co.volume(), co.volume()
    made = [copies.snapshot(co, each.volume_id) for each in (one, one, other)]
    ids = [each.snapshot_id for each in made]
    request = csi_pb2.ListSnapshotsRequest
    assert set(ids) <= set(_listed(co, request()))
    assert set(_listed(co, request(source_volume_id=one.volume_id))) == set(ids[:2])
    assert _listed(co, request(snapshot_id=ids[2])) == [ids[2]]
    assert not _listed(co, request(snapshot_id=_UNKNOWN))
    assert not _listed(co, request(source_volume_id=_UNKNOWN))
    copies.delete(co, ids[0])
    assert not _listed(co, request(snapshot_id=ids[0]))


@case(322, CREATE, SNAPSHOT, LIST_SNAPSHOTS)
def test_snapshots_come_in_pages_that_survive_change(co: Co) -> None:
    """ListSnapshots: at most max_entries a page; what stays is listed once; odd tokens and sizes are
    refused.
    """
    volume = co.volume()
    made = [copies.snapshot(co, volume.volume_id).snapshot_id for _ in range(5)]
    request = csi_pb2.ListSnapshotsRequest(max_entries=2)
    call = co.controller.ListSnapshots
    seen: list[str] = []
    gone = ""
    while True:
        answer = co.ask(call, request)
        assert len(answer.entries) <= 2
        seen += [each.snapshot.snapshot_id for each in answer.entries]
        ours = [each for each in seen if each in made]
        if ours and not gone:
            gone = ours[-1]
            copies.delete(co, gone)
        if not answer.next_token:
            break
        request.starting_token = answer.next_token
    assert len(seen) == len(set(seen))
    assert set(made) - {gone} <= set(seen)
    negative = csi_pb2.ListSnapshotsRequest(max_entries=-1)
    co.refused(call, negative, Code.INVALID_ARGUMENT)
    odd = csi_pb2.ListSnapshotsRequest(starting_token="conformance: no such token")
    co.refused(call, odd, Code.ABORTED)


@case(323, CREATE, SNAPSHOT, GET_SNAPSHOT)
def test_a_snapshot_can_be_looked_up(co: Co) -> None:
    """GetSnapshot: as created; NOT_FOUND for no such snapshot, INVALID_ARGUMENT without an id."""
    volume = co.volume()
    made = copies.snapshot(co, volume.volume_id)
    request = csi_pb2.GetSnapshotRequest
    call = co.controller.GetSnapshot
    assert co.ask(call, request(snapshot_id=made.snapshot_id)).snapshot == made
    co.refused(call, request(snapshot_id=_UNKNOWN), Code.NOT_FOUND)
    co.refused(call, request(), Code.INVALID_ARGUMENT)


def _file(co: Co, target: Path) -> str:
    return copies.checksum(co.sight.read(target / "file", MIB))


def _device(co: Co, target: Path) -> str:
    return copies.checksum(co.sight.read(target, co.sight.size_bytes(target)))


def _scatter(co: Co, target: Path, seed: int) -> None:
    size = co.sight.size_bytes(target)
    for part in range(4):
        offset = size // 4 * part // 4096 * 4096
        co.sight.write(target, copies.noise(10 * seed + part), offset=offset)


def _listed(co: Co, request: csi_pb2.ListSnapshotsRequest) -> list[str]:
    answer = co.ask(co.controller.ListSnapshots, request)
    return [each.snapshot.snapshot_id for each in answer.entries]
