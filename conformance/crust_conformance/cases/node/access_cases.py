"""A volume that is read-only, or published a second time: the specification's table, mode by mode.

C-168, C-206, C-218 to C-220, C-223, C-228 to C-239.
"""

import copy
from pathlib import Path

from crust.wire.csi.v1.csi_pb2 import Volume, VolumeCapability
from crust_conformance.orchestrator.calls import Code
from crust_conformance.orchestrator.capabilities import STAGE
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, Mode, block, mount

_DATA = b"what a database has written"
_EXCEEDED = (Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT)
_CONFLICT = (Code.ALREADY_EXISTS, Code.FAILED_PRECONDITION)
_MULTI_NODE = (
    Mode.MULTI_NODE_READER_ONLY,
    Mode.MULTI_NODE_SINGLE_WRITER,
    Mode.MULTI_NODE_MULTI_WRITER,
)


def test_c223_read_only_is_enforced(co: Co) -> None:
    for capability in co.kinds:
        volume, target = co.used(capability)
        co.host.write(_file_or_device(co, target), _DATA)
        co.unpublish(volume.volume_id, target)
        target = co.publish(volume, capability, readonly=True)
        _check_reader(co, target)
        co.unpublish(volume.volume_id, target)
        assert co.can_write(_file_or_device(co, co.publish(volume, capability)))


def test_c237_a_reader_mode_is_enforced(co: Co) -> None:
    for capability in co.kinds:
        reader = copy.deepcopy(capability)
        reader.access_mode.mode = Mode.SINGLE_NODE_READER_ONLY
        volume = _written(co, capability, reader)
        _check_reader(co, co.use(volume, reader))


def test_c238_a_read_only_flag_is_enforced(co: Co) -> None:
    reader = co.mount
    reader.mount.mount_flags.append("ro")
    volume = _written(co, co.mount, reader)
    _check_reader(co, co.use(volume, reader))


def test_c168_attached_read_only_is_read_only(co: Co) -> None:
    for capability in co.kinds:
        volume = _written(co, capability)
        co.attach(volume, capability, readonly=True)
        if STAGE in co.has:
            co.until_final(co.stage_request(volume, capability))
        _check_reader(co, co.publish(volume, capability))


def _written(co: Co, *capabilities: VolumeCapability) -> Volume:
    """A volume for all of `capabilities`, written under the first, and not in use."""
    volume = co.volume_for(*capabilities)
    target = co.use(volume, capabilities[0])
    co.host.write(_file_or_device(co, target), _DATA)
    co.release(volume, target)
    return volume


def _check_reader(co: Co, target: Path) -> None:
    assert not co.can_write(_file_or_device(co, target)), "a read-only volume was written"
    assert co.host.read(_file_or_device(co, target), len(_DATA)) == _DATA


def _file_or_device(co: Co, target: Path) -> Path:
    """The path to write to: the device, or a file of the filesystem."""
    return target if co.host.is_block(target) else target / "file"


def test_c206_stage_with_unknown_filesystem_is_refused(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    request = co.stage_request(volume, mount(NO_FILESYSTEM))
    co.answered(request, *_EXCEEDED)
    co.stage(volume)


def test_c218_single_node_writer_at_second_target_is_refused(co: Co) -> None:
    capability = _of_mode(co, Mode.SINGLE_NODE_WRITER)
    _check_second_refused(co, co.used(capability)[0], capability)


def test_c219_single_writer_at_second_target_is_refused(co: Co) -> None:
    capability = _of_mode(co, Mode.SINGLE_NODE_SINGLE_WRITER)
    _check_second_refused(co, co.used(capability)[0], capability)


def test_c220_multi_writer_at_second_target_is_ok(co: Co) -> None:
    capability = _of_mode(co, Mode.SINGLE_NODE_MULTI_WRITER)
    volume = co.volume(capability)
    first = co.use(volume, capability)
    second = co.published_again(volume, capability)
    if second is None:
        return
    co.host.write(first / "file", _DATA)
    assert co.file(second) == _DATA
    co.unpublish(volume.volume_id, first)
    assert co.file(second) == _DATA


def test_c228_publish_with_unknown_filesystem_is_refused(co: Co) -> None:
    volume, target = co.staged()
    request = co.publish_request(volume, target, mount(NO_FILESYSTEM))
    co.answered(request, *_EXCEEDED)
    assert not co.host.mounts_at(target)


def test_c229_another_capability_at_the_same_target_is_a_conflict(co: Co) -> None:
    shared = _of_mode(co, Mode.SINGLE_NODE_MULTI_WRITER)
    alone = _of_mode(co, Mode.SINGLE_NODE_SINGLE_WRITER)
    flagged = _of_mode(co, Mode.SINGLE_NODE_MULTI_WRITER)
    flagged.mount.mount_flags.append("noatime")
    volume = co.volume_for(shared, alone)
    target = co.use(volume, shared)
    for capability in (alone, flagged):
        request = co.publish_request(volume, target, capability)
        co.answered(request, *_CONFLICT)
    assert co.host.mounts_at(target) == 1
    co.host.write(target / "file", _DATA)


def test_c230_another_access_type_at_the_same_target_is_a_conflict(co: Co) -> None:
    volume = co.volume_for(co.mount, block())
    target = co.use(volume, co.mount)
    request = co.publish_request(volume, target, block())
    co.answered(request, *_CONFLICT)
    assert co.host.mounts_at(target) == 1


def test_c231_another_capability_at_another_target_is_refused(co: Co) -> None:
    shared = _of_mode(co, Mode.SINGLE_NODE_MULTI_WRITER)
    alone = _of_mode(co, Mode.SINGLE_NODE_SINGLE_WRITER)
    volume = co.volume_for(shared, alone)
    co.use(volume, shared)
    _check_second_refused(co, volume, alone)


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
        assert co.file(reader) == _DATA
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
    volume = _written(co, co.mount, reader)
    target = co.use(volume, reader)
    co.ask(co.publish_request(volume, target, reader))
    _check_second_refused(co, volume, reader)


def test_c235_multi_node_modes_at_second_target_are_ok(co: Co) -> None:
    for mode in _MULTI_NODE:
        capability = _of_mode(co, mode)
        volume = _written(co, co.mount, capability)
        first = co.use(volume, capability)
        second = co.publish(volume, capability)
        assert co.file(first) == _DATA
        assert co.file(second) == _DATA
        request = co.publish_request(volume, second, capability, readonly=True)
        co.answered(request, Code.ALREADY_EXISTS)


def _check_second_refused(co: Co, volume: Volume, capability: VolumeCapability) -> None:
    second = co.target()
    request = co.publish_request(volume, second, capability)
    co.answered(request, Code.FAILED_PRECONDITION)
    assert not co.host.mounts_at(second)


def _of_mode(co: Co, mode: Mode.Mode.ValueType) -> VolumeCapability:
    return mount(co.mount.mount.fs_type, mode)
