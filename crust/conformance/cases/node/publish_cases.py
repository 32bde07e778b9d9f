"""NodePublishVolume, NodeUnpublishVolume (C-211 to C-222, C-224, C-226, C-227)."""

from pathlib import Path

import pytest

from crust.conformance.capabilities import STAGE
from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import Mode, block, mount
from crust.wire.csi.v1 import csi_pb2

_PATH_BYTES = 128
_DATA = b"what a database has written"


def test_c211_publish_needs_a_volume_a_path_and_a_capability(co: Co) -> None:
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    for field in ("volume_id", "target_path", "volume_capability"):
        request = co.publish_request(volume, target)
        request.ClearField(field)
        co.refused(request, Code.INVALID_ARGUMENT)
    request = co.publish_request(volume, target)
    request.volume_id = UNKNOWN_VOLUME
    co.refused(request, Code.NOT_FOUND)
    assert not co.host.mounts_at(target)


def test_c212_publish_needs_staging_first(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    target = co.target()
    request = co.publish_request(volume, target)
    with co.beyond():
        co.refused(request, Code.FAILED_PRECONDITION)
    co.unpublish(volume.volume_id, target)
    co.stage(volume)
    request.ClearField("staging_target_path")
    co.refused(request, Code.FAILED_PRECONDITION)
    assert not co.host.mounts_at(target)


def test_c213_a_filesystem_keeps_what_is_written(co: Co) -> None:
    for fs_type in co.options.parameters.fs_types:
        capability = mount(fs_type)
        volume = co.volume(capability)
        target = co.use(volume, capability)
        assert co.host.mounts_at(target), "nothing is mounted at the target"
        co.host.write(target / "file", _DATA)
        co.release(volume, target)
        assert co.host.read(co.use(volume, capability) / "file", 99) == _DATA


def test_c214_a_device_keeps_what_is_written(co: Co) -> None:
    volume = co.volume(block())
    target = co.use(volume, block())
    assert co.host.is_block(target)
    size = volume.capacity_bytes or co.options.parameters.size_bytes
    assert co.host.size_bytes(target) >= size
    offset = size - 4096
    co.host.write(target, _DATA, offset=offset)
    co.release(volume, target)
    assert co.host.read(co.use(volume, block()), len(_DATA), offset=offset) == _DATA


def test_c215_publish_is_idempotent(co: Co) -> None:
    for capability in co.kinds:
        volume = co.volume(capability)
        target = co.use(volume, capability)
        request = co.publish_request(volume, target, capability)
        co.ask(request)
        assert co.host.mounts_at(target) == 1


def test_c216_publish_with_other_readonly_is_already_exists(co: Co) -> None:
    volume = co.volume()
    target = co.use(volume)
    request = co.publish_request(volume, target, readonly=True)
    co.refused(request, Code.ALREADY_EXISTS)
    co.host.write(target / "file", _DATA)


def test_c217_republish_with_changed_kubelet_keys_is_ok(co: Co) -> None:
    volume = co.volume()
    target = co.use(volume)
    for pod in ("one", "two"):
        request = co.publish_request(volume, target)
        request.volume_context["csi.storage.k8s.io/serviceAccount.tokens"] = f'{{"token":"{pod}"}}'
        request.volume_context["csi.storage.k8s.io/pod.name"] = pod
        co.ask(request)


def test_c218_single_node_writer_at_second_target_is_refused(co: Co) -> None:
    _second_target(co, Mode.SINGLE_NODE_WRITER)


def test_c219_single_writer_at_second_target_is_refused(co: Co) -> None:
    _second_target(co, Mode.SINGLE_NODE_SINGLE_WRITER)


def test_c220_multi_writer_at_second_target_is_ok(co: Co) -> None:
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


def test_c221_unpublish_leaves_nothing_and_is_idempotent(co: Co) -> None:
    for capability in co.kinds:
        volume = co.volume(capability)
        target = co.use(volume, capability)
        request = co.unpublish_request(volume.volume_id, target)
        co.ask(request)
        assert not co.host.mounts_at(target)
        assert not target.exists()
        assert target.parent.exists()
        co.ask(request)
    request = co.unpublish_request(UNKNOWN_VOLUME, co.target())
    co.unknown(request)


def test_c222_unpublish_needs_a_volume_and_a_path(co: Co) -> None:
    request = csi_pb2.NodeUnpublishVolumeRequest
    co.refused(request(volume_id=UNKNOWN_VOLUME), Code.INVALID_ARGUMENT)
    co.refused(request(target_path="/a"), Code.INVALID_ARGUMENT)


def test_c224_paths_may_be_long(co: Co) -> None:
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


def test_c226_mount_group_owns_root_of_volume(co: Co) -> None:
    capability = mount(co.mount.mount.fs_type, group="4321")
    volume = co.volume(capability)
    target = co.use(volume, capability)
    assert co.host.group_of(target) == 4321


def test_c227_an_ephemeral_volume_lives_as_long_as_its_pod(co: Co) -> None:
    target = co.target()
    volume_id = "csi-" + co.name("").encode().hex().ljust(64, "0")[:64]
    for _ in range(2):
        co.ask(co.ephemeral_request(volume_id, target))
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
        co.ask(co.stage_request(volume, path=staging))
    co.ask(co.publish_request(volume, target, path=staging))
    assert co.host.mounts_at(target), "nothing is mounted at the target"


def _second_target(co: Co, mode: Mode.Mode.ValueType) -> None:
    capability = mount(co.mount.mount.fs_type, mode)
    volume = co.volume(capability)
    co.use(volume, capability)
    second = co.target()
    request = co.publish_request(volume, second, capability)
    co.refused(request, Code.FAILED_PRECONDITION)
    assert not co.host.mounts_at(second)
