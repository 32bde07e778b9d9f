"""NodeStageVolume, NodePublishVolume, and back (C-201 to C-205, C-211 to C-227)."""

from pathlib import Path

import pytest

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator.calls import UNKNOWN, Code
from crust_conformance.orchestrator.capabilities import STAGE
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.volume_capabilities import block, mount

_DATA = b"what a database has written"
_PATH_BYTES = 128


def test_c201_stage_needs_a_volume_a_path_and_a_capability(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    request = co.stage_request(volume)
    co.refused_without(request, "volume_id", "staging_target_path", "volume_capability")
    co.refused_with_unknown(request, "volume_id")


def test_c202_stage_and_unstage_are_idempotent(co: Co) -> None:
    volume = co.volume()
    co.stage(volume)
    co.ask(co.stage_request(volume))
    request = co.unstage_request(volume)
    for _ in range(3):
        co.ask(request)
    request.volume_id = UNKNOWN
    co.unknown(request)


def test_c203_unstage_needs_a_volume_and_a_path(co: Co) -> None:
    request = csi_pb2.NodeUnstageVolumeRequest(volume_id=UNKNOWN, staging_target_path="/a")
    co.refused_without(request, "volume_id", "staging_target_path")


def test_c204_stage_with_other_capability_is_already_exists(co: Co) -> None:
    volume = co.volume()
    co.stage(volume)
    request = co.stage_request(volume, block())
    codes = (Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT)
    co.answered(request, Code.ALREADY_EXISTS, *codes)
    co.publish(volume)


def test_c205_stage_at_second_path_keeps_data(co: Co) -> None:
    volume, target = co.used(file=_DATA)
    second_path = co.staging(volume, "other")
    stage, unstage = co.stage_request(volume), co.unstage_request(volume)
    stage.staging_target_path = unstage.staging_target_path = str(second_path)
    co.outcome(stage)
    assert co.file(target) == _DATA
    co.unpublish(volume.volume_id, target)
    if STAGE in co.has:
        co.until_final(unstage)
    co.unstage(volume)
    assert co.file(co.use(volume)) == _DATA


def test_c225_unstage_while_published_keeps_data(co: Co) -> None:
    volume, target = co.used(file=_DATA)
    co.outcome(co.unstage_request(volume))
    assert co.file(target) == _DATA


def test_c211_publish_needs_a_volume_a_path_and_a_capability(co: Co) -> None:
    volume, target = co.staged()
    request = co.publish_request(volume, target)
    co.refused_without(request, "volume_id", "target_path", "volume_capability")
    co.refused_with_unknown(request, "volume_id")
    assert not co.host.mounts_at(target)


def test_c212_publish_needs_staging_first(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    target = co.target()
    request = co.publish_request(volume, target)
    with co.beyond():
        co.answered(request, Code.FAILED_PRECONDITION)
    co.unpublish(volume.volume_id, target)
    co.stage(volume)
    request.ClearField("staging_target_path")
    co.answered(request, Code.FAILED_PRECONDITION)
    assert not co.host.mounts_at(target)


def test_c213_a_filesystem_keeps_what_is_written(co: Co) -> None:
    for fs_type in co.options.parameters.fs_types:
        capability = mount(fs_type)
        volume, target = co.used(capability)
        assert co.host.mounts_at(target), "nothing is mounted at the target"
        co.host.write(target / "file", _DATA)
        co.release(volume, target)
        assert co.file(co.use(volume, capability)) == _DATA


def test_c214_a_device_keeps_what_is_written(co: Co) -> None:
    volume, target = co.used(block())
    assert co.host.is_block(target)
    size = volume.capacity_bytes or co.options.parameters.size_bytes
    assert co.host.size_bytes(target) >= size
    offset = size - 4096
    co.host.write(target, _DATA, offset=offset)
    co.release(volume, target)
    assert co.host.read(co.use(volume, block()), len(_DATA), offset=offset) == _DATA


def test_c215_publish_is_idempotent(co: Co) -> None:
    for capability in co.kinds:
        volume, target = co.used(capability)
        request = co.publish_request(volume, target, capability)
        co.ask(request)
        assert co.host.mounts_at(target) == 1


def test_c216_publish_with_other_readonly_is_already_exists(co: Co) -> None:
    volume, target = co.used()
    request = co.publish_request(volume, target, readonly=True)
    co.answered(request, Code.ALREADY_EXISTS)
    co.host.write(target / "file", _DATA)


def test_c217_republish_with_changed_kubelet_keys_is_ok(co: Co) -> None:
    volume, target = co.used()
    for pod in ("one", "two"):
        request = co.publish_request(volume, target)
        request.volume_context["csi.storage.k8s.io/serviceAccount.tokens"] = f'{{"token":"{pod}"}}'
        request.volume_context["csi.storage.k8s.io/pod.name"] = pod
        co.ask(request)


def test_c221_unpublish_leaves_nothing_and_is_idempotent(co: Co) -> None:
    for capability in co.kinds:
        volume, target = co.used(capability)
        request = co.unpublish_request(volume.volume_id, target)
        co.ask(request)
        assert not co.host.mounts_at(target)
        assert not co.host.has(target)
        assert co.host.has(target.parent)
        co.ask(request)
    co.unknown(co.unpublish_request(UNKNOWN, co.target()))


def test_c222_unpublish_needs_a_volume_and_a_path(co: Co) -> None:
    request = co.unpublish_request(UNKNOWN, co.root)
    co.refused_without(request, "volume_id", "target_path")


def test_c224_paths_may_be_long(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    staging = co.staging(volume, _filling(co.staging(volume).parent))
    target = co.target(_filling(co.root / "pods"))
    if len(str(target)) <= _PATH_BYTES:  # the operator's --target-root may be long
        _publish_at(co, volume, staging, target)
        co.unpublish(volume.volume_id, target)
        unstage = co.unstage_request(volume)
        unstage.staging_target_path = str(staging)
        if STAGE in co.has:
            co.until_final(unstage)
    with co.should():
        _publish_at(co, volume, co.staging(volume, "long-" * 30), co.target("pod-" * 32))


def test_c226_mount_group_owns_root_of_volume(co: Co) -> None:
    capability = mount(co.mount.mount.fs_type, group="4321")
    _, target = co.used(capability)
    assert co.host.group_of(target) == 4321


def test_c227_an_ephemeral_volume_lives_as_long_as_its_pod(co: Co) -> None:
    target = co.target()
    request = co.ephemeral_request(target)
    for _ in range(2):
        co.ask(request)
        with pytest.raises(FileNotFoundError):
            co.host.read(target / "file", 1)
        co.host.write(target / "file", _DATA)
        co.unpublish(request.volume_id, target)
        assert not co.host.has(target)


def _filling(parent: Path) -> str:
    """A name with which parent/name/mount is as long as the paths that a driver must accept."""
    return "x" * max(1, _PATH_BYTES - len(f"{parent}//mount"))


def _publish_at(co: Co, volume: csi_pb2.Volume, staging: Path, target: Path) -> None:
    """Publish at these paths. A refused step is not undone: a driver cannot undo it at a path that it refuses."""
    stage, publish = co.stage_request(volume), co.publish_request(volume, target)
    stage.staging_target_path = str(staging)
    if STAGE in co.has:
        publish.staging_target_path = str(staging)
        co.ask(stage)
    co.ask(publish)
    assert co.host.mounts_at(target), "nothing is mounted at the target"
