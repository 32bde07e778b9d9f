"""The second NodePublishVolume of a volume: the specification's table, mode by mode (C-228 to C-236)."""

from pathlib import Path

from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, Mode, block, mount
from crust.wire.csi.v1 import csi_pb2

_DATA = b"what both of them see"
_EXCEEDED = (Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT)
_CONFLICT = (Code.ALREADY_EXISTS, Code.FAILED_PRECONDITION)
_MULTI_NODE = (
    Mode.MULTI_NODE_READER_ONLY,
    Mode.MULTI_NODE_SINGLE_WRITER,
    Mode.MULTI_NODE_MULTI_WRITER,
)


def test_c206_stage_with_unknown_filesystem_is_refused(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    request = co.stage_request(volume, mount(NO_FILESYSTEM))
    co.refused(request, *_EXCEEDED)
    co.stage(volume)


def test_c228_publish_with_unknown_filesystem_is_refused(co: Co) -> None:
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    request = co.publish_request(volume, target, mount(NO_FILESYSTEM))
    co.refused(request, *_EXCEEDED)
    assert not co.host.mounts_at(target)


def test_c229_another_capability_at_the_same_target_is_a_conflict(co: Co) -> None:
    shared = _of_mode(co, Mode.SINGLE_NODE_MULTI_WRITER)
    alone = _of_mode(co, Mode.SINGLE_NODE_SINGLE_WRITER)
    flagged = _of_mode(co, Mode.SINGLE_NODE_MULTI_WRITER)
    flagged.mount.mount_flags.append("noatime")
    volume = co.volume_for(shared, alone)
    target = co.use(volume, shared)
    for other in (alone, flagged):
        request = co.publish_request(volume, target, other)
        co.refused(request, *_CONFLICT)
    assert co.host.mounts_at(target) == 1
    co.host.write(target / "file", _DATA)


def test_c230_another_access_type_at_the_same_target_is_a_conflict(co: Co) -> None:
    volume = co.volume_for(co.mount, block())
    target = co.use(volume, co.mount)
    request = co.publish_request(volume, target, block())
    co.refused(request, *_CONFLICT)
    assert co.host.mounts_at(target) == 1


def test_c231_another_capability_at_another_target_is_refused(co: Co) -> None:
    shared = _of_mode(co, Mode.SINGLE_NODE_MULTI_WRITER)
    alone = _of_mode(co, Mode.SINGLE_NODE_SINGLE_WRITER)
    volume = co.volume_for(shared, alone)
    co.use(volume, shared)
    second = co.target()
    request = co.publish_request(volume, second, alone)
    co.refused(request, Code.FAILED_PRECONDITION)
    assert not co.host.mounts_at(second)


def test_c232_readonly_target_beside_writer_is_ok(co: Co) -> None:
    shared = _of_mode(co, Mode.SINGLE_NODE_MULTI_WRITER)
    for reader_first in (False, True):
        volume = co.volume(shared)
        co.stage(volume, shared)
        first = co.publish(volume, shared, readonly=reader_first)
        second = co.published_again(volume, shared, readonly=not reader_first)
        if second is None:
            continue
        reader, writer = (first, second) if reader_first else (second, first)
        co.host.write(writer / "file", _DATA)
        assert co.host.read(reader / "file", 99) == _DATA
        assert not co.can_write(reader / "file")


def test_c233_raw_multi_writer_targets_share_one_device(co: Co) -> None:
    shared = block(Mode.SINGLE_NODE_MULTI_WRITER)
    volume = co.volume(shared)
    first = co.use(volume, shared)
    second = co.published_again(volume, shared)
    if second is None:
        return
    co.host.write(first, _DATA)
    assert co.host.read(second, len(_DATA)) == _DATA
    co.unpublish(volume.volume_id, first)
    assert co.host.read(second, len(_DATA)) == _DATA


def test_c234_single_node_reader_at_second_target_is_refused(co: Co) -> None:
    reader = _of_mode(co, Mode.SINGLE_NODE_READER_ONLY)
    volume = _written(co, reader)
    target = co.use(volume, reader)
    co.ask(co.publish_request(volume, target, reader))
    second = co.target()
    request = co.publish_request(volume, second, reader)
    co.refused(request, Code.FAILED_PRECONDITION)
    assert not co.host.mounts_at(second)


def test_c235_multi_node_modes_at_second_target_are_ok(co: Co) -> None:
    for mode in _MULTI_NODE:
        capability = _of_mode(co, mode)
        volume = _written(co, capability)
        first = co.use(volume, capability)
        second = co.publish(volume, capability)
        assert co.host.read(first / "file", 99) == _DATA
        assert co.host.read(second / "file", 99) == _DATA
        request = co.publish_request(volume, second, capability, readonly=True)
        co.refused(request, Code.ALREADY_EXISTS)


def _of_mode(co: Co, mode: Mode.Mode.ValueType) -> csi_pb2.VolumeCapability:
    return mount(co.mount.mount.fs_type, mode)


def _written(co: Co, capability: csi_pb2.VolumeCapability) -> csi_pb2.Volume:
    """A volume that a writer left a file in, and not in use."""
    volume = co.volume_for(co.mount, capability)
    target = co.use(volume, co.mount)
    _write(co, target)
    co.release(volume, target)
    return volume


def _write(co: Co, target: Path) -> None:
    co.host.write(target / "file", _DATA)
