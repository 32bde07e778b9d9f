"""The second NodePublishVolume of a volume: the specification's table, mode by mode (C-228 to C-236)."""

from pathlib import Path

from crust.conformance.case import (
    BLOCK,
    CHECKS_FS_TYPE,
    CREATE,
    MULTI_WRITER,
    NODE,
    STAGE,
    case,
    must,
    should,
)
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


@case(206, CREATE, STAGE, CHECKS_FS_TYPE)
@must(
    "NodeStageVolume Errors",
    "a capability that the volume does not support MUST be FAILED_PRECONDITION",
)
def test_stage_with_unknown_filesystem_is_refused(co: Co) -> None:
    """NodeStageVolume: an unknown filesystem is FAILED_PRECONDITION (or INVALID_ARGUMENT), and the volume
    can be staged after that.
    """
    volume = co.volume()
    co.attach(volume)
    request = co.stage_request(volume, mount(NO_FILESYSTEM))
    co.refused(co.node.NodeStageVolume, request, *_EXCEEDED)
    co.stage(volume)


@case(228, CREATE, NODE, CHECKS_FS_TYPE)
@should(
    "NodePublishVolume",
    "another volume_capability than the volume was staged with SHOULD be FAILED_PRECONDITION",
)
def test_publish_with_unknown_filesystem_is_refused(co: Co) -> None:
    """NodePublishVolume: an unknown filesystem is FAILED_PRECONDITION (or INVALID_ARGUMENT), and nothing is
    mounted.
    """
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    request = co.publish_request(volume, target, mount(NO_FILESYSTEM))
    co.refused(co.node.NodePublishVolume, request, *_EXCEEDED)
    assert not co.host.mounts_at(target)


@case(229, CREATE, MULTI_WRITER)
@should(
    "NodePublishVolume, second table",
    "the same target with another argument SHOULD be ALREADY_EXISTS",
)
def test_another_capability_at_the_same_target_is_a_conflict(co: Co) -> None:
    """NodePublishVolume, second-call table: the same target with another mode, or with mount flags, is
    ALREADY_EXISTS (or FAILED_PRECONDITION), and what is there stays.
    """
    shared = _of_mode(co, Mode.SINGLE_NODE_MULTI_WRITER)
    alone = _of_mode(co, Mode.SINGLE_NODE_SINGLE_WRITER)
    flagged = _of_mode(co, Mode.SINGLE_NODE_MULTI_WRITER)
    flagged.mount.mount_flags.append("noatime")
    volume = co.volume_for(shared, alone)
    target = co.use(volume, shared)
    for other in (alone, flagged):
        request = co.publish_request(volume, target, other)
        co.refused(co.node.NodePublishVolume, request, *_CONFLICT)
    assert co.host.mounts_at(target) == 1
    co.host.write(target / "file", _DATA)


@case(230, CREATE, NODE, BLOCK)
@should(
    "NodePublishVolume, second table",
    "the same target with another argument SHOULD be ALREADY_EXISTS",
)
def test_another_access_type_at_the_same_target_is_a_conflict(co: Co) -> None:
    """NodePublishVolume, second-call table: a device at the target of a filesystem is ALREADY_EXISTS (or
    FAILED_PRECONDITION).
    """
    volume = co.volume_for(co.mount, block())
    target = co.use(volume, co.mount)
    request = co.publish_request(volume, target, block())
    co.refused(co.node.NodePublishVolume, request, *_CONFLICT)
    assert co.host.mounts_at(target) == 1


@case(231, CREATE, MULTI_WRITER)
@should(
    "NodePublishVolume",
    "a second publish with another volume_capability SHOULD be FAILED_PRECONDITION",
)
def test_another_capability_at_another_target_is_refused(co: Co) -> None:
    """NodePublishVolume: a second target with another volume_capability is FAILED_PRECONDITION."""
    shared = _of_mode(co, Mode.SINGLE_NODE_MULTI_WRITER)
    alone = _of_mode(co, Mode.SINGLE_NODE_SINGLE_WRITER)
    volume = co.volume_for(shared, alone)
    co.use(volume, shared)
    second = co.target()
    request = co.publish_request(volume, second, alone)
    co.refused(co.node.NodePublishVolume, request, Code.FAILED_PRECONDITION)
    assert not co.host.mounts_at(second)


@case(232, CREATE, MULTI_WRITER)
@must(
    "NodePublishVolume",
    "with readonly the SP MUST publish in readonly mode, and without it so that the volume "
    "can be used as described",
)
@should(
    "NodePublishVolume, second table",
    "a second target, SINGLE_NODE_MULTI_WRITER, with another argument SHOULD be OK",
)
def test_readonly_target_beside_writer_is_ok(co: Co) -> None:
    """NodePublishVolume, second-call table: SINGLE_NODE_MULTI_WRITER at a second target with readonly is OK,
    in either order; it reads what the other one writes, and cannot write.
    """
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


@case(233, CREATE, MULTI_WRITER, BLOCK)
@must("NodePublishVolume", "the SP MUST ensure that the published volume can be used as described")
@should(
    "NodePublishVolume, second table",
    "a second target, SINGLE_NODE_MULTI_WRITER, SHOULD be OK",
)
def test_raw_multi_writer_targets_share_one_device(co: Co) -> None:
    """NodePublishVolume, second-call table: a raw SINGLE_NODE_MULTI_WRITER volume at two targets is one
    device; unpublishing one leaves the other.
    """
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


@case(234, CREATE, NODE)
@should(
    "NodePublishVolume, second table",
    "a second target, not MULTI_NODE, SHOULD be FAILED_PRECONDITION",
)
def test_single_node_reader_at_second_target_is_refused(co: Co) -> None:
    """NodePublishVolume, second-call table: SINGLE_NODE_READER_ONLY at the same target is OK, at a second one
    FAILED_PRECONDITION.
    """
    reader = _of_mode(co, Mode.SINGLE_NODE_READER_ONLY)
    volume = _written(co, reader)
    target = co.use(volume, reader)
    co.ask(co.node.NodePublishVolume, co.publish_request(volume, target, reader))
    second = co.target()
    request = co.publish_request(volume, second, reader)
    co.refused(co.node.NodePublishVolume, request, Code.FAILED_PRECONDITION)
    assert not co.host.mounts_at(second)


@case(235, CREATE, NODE, "parameters.multi_node")
@should(
    "NodePublishVolume, second table",
    "a second target, MULTI_NODE, SHOULD be OK; the same one with another argument ALREADY_EXISTS",
)
def test_multi_node_modes_at_second_target_are_ok(co: Co) -> None:
    """NodePublishVolume, second-call table: the MULTI_NODE modes at a second target of a node are OK, at the
    same one with other arguments ALREADY_EXISTS.
    """
    for mode in _MULTI_NODE:
        capability = _of_mode(co, mode)
        volume = _written(co, capability)
        first = co.use(volume, capability)
        second = co.publish(volume, capability)
        assert co.host.read(first / "file", 99) == _DATA
        assert co.host.read(second / "file", 99) == _DATA
        request = co.publish_request(volume, second, capability, readonly=True)
        co.refused(co.node.NodePublishVolume, request, Code.ALREADY_EXISTS)


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
