"""NodePublishVolume, NodeUnpublishVolume (C-211 to C-222, C-224, C-226, C-227)."""

from pathlib import Path

import pytest

from crust.conformance.case import (
    BLOCK,
    CREATE,
    EPHEMERAL,
    MOUNT_GROUP,
    MULTI_WRITER,
    NODE,
    STAGE,
    beyond,
    case,
    must,
    should,
)
from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import Mode, block, mount
from crust.wire.csi.v1 import csi_pb2

_PATH_BYTES = 128
_DATA = b"what a database has written"


@case(211, CREATE, NODE)
@must(
    "NodePublishVolume Errors",
    "a volume that does not exist MUST be NOT_FOUND; volume_id, target_path and "
    "volume_capability are REQUIRED",
)
def test_publish_needs_a_volume_a_path_and_a_capability(co: Co) -> None:
    """NodePublishVolume: INVALID_ARGUMENT without one of them; NOT_FOUND for no such volume."""
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    for field in ("volume_id", "target_path", "volume_capability"):
        request = co.publish_request(volume, target)
        request.ClearField(field)
        co.refused(co.node.NodePublishVolume, request, Code.INVALID_ARGUMENT)
    request = co.publish_request(volume, target)
    request.volume_id = UNKNOWN_VOLUME
    co.refused(co.node.NodePublishVolume, request, Code.NOT_FOUND)
    assert not co.host.mounts_at(target)


@case(212, CREATE, STAGE)
@must(
    "NodePublishVolume Errors",
    "STAGE_UNSTAGE_VOLUME, and no staging_target_path, MUST be FAILED_PRECONDITION",
)
@beyond(
    "NodePublishVolume",
    "the CO MUST stage a volume first; a plugin that checks it keeps a pod from an empty directory",
)
def test_publish_needs_staging_first(co: Co) -> None:
    """NodePublishVolume: FAILED_PRECONDITION without staging_target_path, or when nothing is staged there."""
    volume = co.volume()
    co.attach(volume)
    target = co.target()
    request = co.publish_request(volume, target)
    with co.beyond():
        co.refused(co.node.NodePublishVolume, request, Code.FAILED_PRECONDITION)
    co.unpublish(volume.volume_id, target)
    co.stage(volume)
    request.ClearField("staging_target_path")
    co.refused(co.node.NodePublishVolume, request, Code.FAILED_PRECONDITION)
    assert not co.host.mounts_at(target)


@case(213, CREATE, NODE)
@must(
    "NodePublishVolume",
    "the SP SHALL place the mounted directory at target_path, and MUST ensure that the "
    "volume can be used",
)
def test_a_filesystem_keeps_what_is_written(co: Co) -> None:
    """NodePublishVolume: mounted at the target; what is written is there after unpublish, unstage and
    another publish.
    """
    for fs_type in co.options.parameters.fs_types:
        capability = mount(fs_type)
        volume = co.volume(capability)
        target = co.use(volume, capability)
        assert co.host.mounts_at(target), "nothing is mounted at the target"
        co.host.write(target / "file", _DATA)
        co.release(volume, target)
        assert co.host.read(co.use(volume, capability) / "file", 99) == _DATA


@case(214, CREATE, NODE, BLOCK)
@must(
    "NodePublishVolume",
    "the SP SHALL place the block device at target_path; it MUST be at least required_bytes",
)
def test_a_device_keeps_what_is_written(co: Co) -> None:
    """NodePublishVolume: a block device of the volume's size at the target; what is written stays."""
    volume = co.volume(block())
    target = co.use(volume, block())
    assert co.host.is_block(target)
    size = volume.capacity_bytes or co.options.parameters.size_bytes
    assert co.host.size_bytes(target) >= size
    offset = size - 4096
    co.host.write(target, _DATA, offset=offset)
    co.release(volume, target)
    assert co.host.read(co.use(volume, block()), len(_DATA), offset=offset) == _DATA


@case(215, CREATE, NODE)
@must("NodePublishVolume", "idempotent: published at target_path already MUST be OK")
def test_publish_is_idempotent(co: Co) -> None:
    """NodePublishVolume: repeated, it is OK and mounts nothing on top."""
    for capability in co.kinds:
        volume = co.volume(capability)
        target = co.use(volume, capability)
        request = co.publish_request(volume, target, capability)
        co.ask(co.node.NodePublishVolume, request)
        assert co.host.mounts_at(target) == 1


@case(216, CREATE, NODE)
@should(
    "NodePublishVolume, second table",
    "the same target with another argument SHOULD be ALREADY_EXISTS",
)
def test_publish_with_other_readonly_is_already_exists(co: Co) -> None:
    """NodePublishVolume: another readonly at the same target is ALREADY_EXISTS, and what is there stays."""
    volume = co.volume()
    target = co.use(volume)
    request = co.publish_request(volume, target, readonly=True)
    co.refused(co.node.NodePublishVolume, request, Code.ALREADY_EXISTS)
    co.host.write(target / "file", _DATA)


@case(217, CREATE, NODE)
@beyond("Kubernetes", "a kubelet publishes again with new tokens in volume_context")
def test_republish_with_changed_kubelet_keys_is_ok(co: Co) -> None:
    """NodePublishVolume: csi.storage.k8s.io/ keys (tokens, pods) that change with a republish do no harm."""
    volume = co.volume()
    target = co.use(volume)
    for pod in ("one", "two"):
        request = co.publish_request(volume, target)
        request.volume_context["csi.storage.k8s.io/serviceAccount.tokens"] = f'{{"token":"{pod}"}}'
        request.volume_context["csi.storage.k8s.io/pod.name"] = pod
        co.ask(co.node.NodePublishVolume, request)


@case(218, CREATE, NODE)
@should(
    "NodePublishVolume, second table",
    "a second target, not MULTI_NODE, SHOULD be FAILED_PRECONDITION",
)
def test_single_node_writer_at_second_target_is_refused(co: Co) -> None:
    """NodePublishVolume, second-call table: SINGLE_NODE_WRITER at a second target is FAILED_PRECONDITION."""
    _second_target(co, Mode.SINGLE_NODE_WRITER)


@case(219, CREATE, MULTI_WRITER)
@should(
    "NodePublishVolume, second table",
    "a second target, SINGLE_NODE_SINGLE_WRITER, SHOULD be FAILED_PRECONDITION",
)
def test_single_writer_at_second_target_is_refused(co: Co) -> None:
    """NodePublishVolume, second-call table: SINGLE_NODE_SINGLE_WRITER at a second target is
    FAILED_PRECONDITION.
    """
    _second_target(co, Mode.SINGLE_NODE_SINGLE_WRITER)


@case(220, CREATE, MULTI_WRITER)
@must("NodePublishVolume", "the SP MUST ensure that the published volume can be used as described")
@should(
    "NodePublishVolume, second table", "a second target, SINGLE_NODE_MULTI_WRITER, SHOULD be OK"
)
def test_multi_writer_at_second_target_is_ok(co: Co) -> None:
    """NodePublishVolume, second-call table: SINGLE_NODE_MULTI_WRITER at a second target is OK, and shows
    the same files.
    """
    capability = mount(co.mount.mount.fs_type, Mode.SINGLE_NODE_MULTI_WRITER)
    volume = co.volume(capability)
    one = co.use(volume, capability)
    other = co.published_again(volume, capability)
    if other is None:
        return
    co.host.write(one / "file", _DATA)
    assert co.host.read(other / "file", 99) == _DATA
    co.unpublish(volume.volume_id, one)
    assert co.host.read(other / "file", 99) == _DATA


@case(221, CREATE, NODE)
@must(
    "NodeUnpublishVolume",
    "MUST undo the publish and delete what the SP created at target_path; idempotent; a "
    "volume that does not exist is NOT_FOUND, or OK",
)
def test_unpublish_leaves_nothing_and_is_idempotent(co: Co) -> None:
    """NodeUnpublishVolume: unmounts and removes the target; OK again; OK or NOT_FOUND for no such volume."""
    for capability in co.kinds:
        volume = co.volume(capability)
        target = co.use(volume, capability)
        request = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=volume.volume_id, target_path=str(target)
        )
        co.ask(co.node.NodeUnpublishVolume, request)
        assert not co.host.mounts_at(target)
        assert not target.exists()
        assert target.parent.exists()
        co.ask(co.node.NodeUnpublishVolume, request)
    request = csi_pb2.NodeUnpublishVolumeRequest(
        volume_id=UNKNOWN_VOLUME, target_path=str(co.target())
    )
    co.unknown(co.node.NodeUnpublishVolume, request)


@case(222, NODE)
@must(
    "NodeUnpublishVolume", "volume_id and target_path are REQUIRED (Error Scheme: INVALID_ARGUMENT)"
)
def test_unpublish_needs_a_volume_and_a_path(co: Co) -> None:
    """NodeUnpublishVolume: INVALID_ARGUMENT without one of them."""
    request = csi_pb2.NodeUnpublishVolumeRequest
    call = co.node.NodeUnpublishVolume
    co.refused(call, request(volume_id=UNKNOWN_VOLUME), Code.INVALID_ARGUMENT)
    co.refused(call, request(target_path="/a"), Code.INVALID_ARGUMENT)


@case(224, CREATE, NODE)
@must("NodePublishVolume, NodeStageVolume", "the SP MUST accept paths of at least 128 bytes")
@should(
    "NodePublishVolume, NodeStageVolume",
    "the SP SHOULD support the maximum path length of the operating system",
)
def test_paths_may_be_long(co: Co) -> None:
    """Size Limits: target and staging paths of 128 bytes are accepted, and longer ones, too."""
    volume = co.volume()
    co.attach(volume)
    staging = co.staging(volume, _filling(co.staging(volume).parent))
    target = co.target(_filling(co.root / "pods"))
    if len(str(target)) <= _PATH_BYTES:  # the operator's --target-root may be long
        _publish_at(co, volume, staging, target)
        co.unpublish(volume.volume_id, target)
        co.unstage(volume, path=staging)
    with co.should():
        _publish_at(co, volume, co.staging(volume, "long-" * 30), co.target("pod-" * 32))


@case(226, CREATE, NODE, MOUNT_GROUP)
@should(
    "VolumeCapability",
    "with VOLUME_MOUNT_GROUP, entries SHOULD be readable and writable by the group",
)
def test_mount_group_owns_root_of_volume(co: Co) -> None:
    """VOLUME_MOUNT_GROUP: the root of the mounted filesystem has the group that was delegated."""
    capability = mount(co.mount.mount.fs_type, group="4321")
    volume = co.volume(capability)
    target = co.use(volume, capability)
    assert co.host.group_of(target) == 4321


@case(227, NODE, EPHEMERAL)
@beyond(
    "Kubernetes",
    "inline ephemeral volumes: NodePublishVolume creates one, NodeUnpublishVolume deletes it",
)
def test_an_ephemeral_volume_lives_as_long_as_its_pod(co: Co) -> None:
    """Inline ephemeral volumes: publish creates one; unpublish deletes it, and the next one is empty."""
    target = co.target()
    volume_id = "csi-" + co.name("").encode().hex().ljust(64, "0")[:64]
    for _ in range(2):
        co.ask(co.node.NodePublishVolume, co.ephemeral_request(volume_id, target))
        with pytest.raises(FileNotFoundError):
            co.host.read(target / "file", 1)
        co.host.write(target / "file", _DATA)
        co.unpublish(volume_id, target)
        assert not target.exists()


def _filling(parent: Path) -> str:
    """A name with which parent/name/mount is as long as the paths that a driver must accept."""
    return "x" * max(1, _PATH_BYTES - len(f"{parent}//mount"))


def _publish_at(co: Co, volume: csi_pb2.Volume, staging: Path, target: Path) -> None:
    """Undone in the end only where it was done: a driver that refuses a path cannot undo anything there."""
    if STAGE in co.has:
        co.ask(co.node.NodeStageVolume, co.stage_request(volume, path=staging))
    co.ask(co.node.NodePublishVolume, co.publish_request(volume, target, path=staging))
    assert co.host.mounts_at(target), "nothing is mounted at the target"


def _second_target(co: Co, mode: Mode.Mode.ValueType) -> None:
    capability = mount(co.mount.mount.fs_type, mode)
    volume = co.volume(capability)
    co.use(volume, capability)
    second = co.target()
    request = co.publish_request(volume, second, capability)
    co.refused(co.node.NodePublishVolume, request, Code.FAILED_PRECONDITION)
    assert not co.host.mounts_at(second)
