"""A driver that is killed between any two calls, and during them (C-701 to C-708)."""

from typing import Any

from crust.conformance import restart_command
from crust.conformance.case import (
    CLONE,
    CREATE,
    EXPAND,
    GROUP,
    NODE,
    NODE_EXPAND,
    ONLINE,
    RESTART,
    SNAPSHOT,
    case,
    must,
)
from crust.conformance.orchestrator import copies, expansion
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2

_DATA = b"written before the crash"


@case(701, CREATE, NODE, RESTART)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_lifecycle_survives_restart_after_each_call(co: Co) -> None:
    """A lifecycle with a restart after every call gives the same results as one without; nothing is lost."""
    request = co.create_request()
    volume = co.create(request)
    _restart(co)
    again = co.until_final(co.controller.CreateVolume, request).volume
    assert again.volume_id == volume.volume_id
    co.stage(volume)
    _restart(co)
    target = co.publish(volume)
    co.host.write(target / "file", _DATA)
    _restart(co)
    assert co.host.read(target / "file", 99) == _DATA
    co.until_final(co.node.NodePublishVolume, co.publish_request(volume, target))
    assert co.host.mounts_at(target) == 1
    co.unpublish(volume.volume_id, target)
    assert not co.host.mounts_at(target)
    _restart(co)
    co.unpublish(volume.volume_id, target)
    co.unstage(volume)
    _restart(co)
    co.unstage(volume)
    co.detach(volume.volume_id)
    _restart(co)
    assert co.host.read(co.use(volume) / "file", 99) == _DATA


@case(702, CREATE, NODE, RESTART)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_calls_killed_midway_succeed_when_retried(co: Co) -> None:
    """A driver that is killed while it creates, stages and publishes: the retries succeed, and do nothing twice."""
    requests = [co.create_request() for _ in range(4)]
    futures = [co.controller.CreateVolume.future(each, timeout=10) for each in requests]
    _restart(co)
    for future in futures:
        future.cancel()
    volumes = [co.until_final(co.controller.CreateVolume, each).volume for each in requests]
    assert len({each.volume_id for each in volumes}) == len(requests)
    volume = volumes[0]
    co.attach(volume)
    target = co.target()
    if "node.STAGE_UNSTAGE_VOLUME" in co.has:
        _killed_during(co, co.node.NodeStageVolume, co.stage_request(volume))
    co.stage(volume)
    publish = co.publish_request(volume, target)
    _killed_during(co, co.node.NodePublishVolume, publish)
    co.until_final(co.node.NodePublishVolume, publish)
    assert co.host.mounts_at(target) == 1
    co.host.write(target / "file", _DATA)


@case(703, CREATE, SNAPSHOT, NODE, RESTART)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_a_crash_during_a_snapshot_leaves_the_volume_usable(co: Co) -> None:
    """A driver that is killed while it takes a snapshot leaves no frozen filesystem; the retry returns a
    complete snapshot.
    """
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", _DATA)
    request = copies.snapshot_request(co, volume.volume_id)
    _killed_during(co, co.controller.CreateSnapshot, request)
    co.host.write(target / "other", _DATA)
    made = copies.take(co, request)
    restored = co.volume(source=copies.of_snapshot(made.snapshot_id))
    assert co.host.read(co.use(restored) / "file", 99) == _DATA


@case(704, CREATE, SNAPSHOT, NODE, RESTART)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_snapshot_and_restore_survive_restart_after_each_call(co: Co) -> None:
    """A snapshot, a restore and their removal give the same results with a restart after each call as without."""
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", _DATA)
    request = copies.snapshot_request(co, volume.volume_id)
    made = copies.take(co, request)
    _restart(co)
    again = co.until_final(co.controller.CreateSnapshot, request).snapshot
    assert again.snapshot_id == made.snapshot_id
    assert again.creation_time == made.creation_time
    co.host.write(target / "file", b"something else altogether")
    create = co.create_request(source=copies.of_snapshot(made.snapshot_id))
    restored = co.create(create)
    _restart(co)
    once_more = co.until_final(co.controller.CreateVolume, create).volume
    assert once_more.volume_id == restored.volume_id
    copies.delete(co, made.snapshot_id)
    _restart(co)
    copies.delete(co, made.snapshot_id)
    assert co.host.read(co.use(restored) / "file", 99) == _DATA


@case(705, CREATE, CLONE, NODE, RESTART)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_clone_killed_midway_succeeds_when_retried(co: Co) -> None:
    """A driver that is killed while it clones, and after that: the retry returns the complete clone, and the
    source can be written.
    """
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", _DATA)
    request = co.create_request(source=copies.of_volume(volume.volume_id))
    _killed_during(co, co.controller.CreateVolume, request)
    clone = co.until_final(co.controller.CreateVolume, request).volume
    _restart(co)
    again = co.until_final(co.controller.CreateVolume, request).volume
    assert again.volume_id == clone.volume_id
    co.host.write(target / "file", b"something else altogether")
    assert co.host.read(co.use(clone) / "file", 99) == _DATA


@case(706, CREATE, EXPAND, NODE_EXPAND, ONLINE, NODE, RESTART)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_expansion_killed_midway_succeeds_when_retried(co: Co) -> None:
    """A driver that is killed during either half of an expansion, and between them: the retries reach the
    size, and the files are kept.
    """
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", _DATA)
    sized, before = expansion.has_its_own_size(co, volume, target), co.host.size_bytes(target)
    halves: list[tuple[Any, Any]] = [
        (co.controller.ControllerExpandVolume, expansion.controller_request(co, volume)),
        (co.node.NodeExpandVolume, expansion.node_request(co, volume, target)),
    ]
    for call, request in halves:
        _killed_during(co, call, request)
        co.until_final(call, request)
    _restart(co)
    assert not sized or co.host.size_bytes(target) >= 1.6 * before
    assert co.host.read(target / "file", 99) == _DATA


@case(707, CREATE, GROUP, NODE, RESTART)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_group_snapshot_killed_midway_succeeds_when_retried(co: Co) -> None:
    """A driver that is killed while it takes a group snapshot, and after that: nothing stays frozen, and the
    retry returns the complete group, which stays the same.
    """
    volumes = [co.volume() for _ in range(2)]
    targets = [co.use(each) for each in volumes]
    for target in targets:
        co.host.write(target / "file", _DATA)
    request = copies.group_request(co, [each.volume_id for each in volumes])
    _killed_during(co, co.groups.CreateVolumeGroupSnapshot, request)
    for target in targets:
        co.host.write(target / "other", _DATA)
    made = copies.take_group(co, request)
    _restart(co)
    assert copies.members(copies.take_group(co, request)) == copies.members(made)
    for member in made.snapshots:
        restored = co.volume(source=copies.of_snapshot(member.snapshot_id))
        assert co.host.read(co.use(restored) / "file", 99) == _DATA
    deletion = copies.group_deletion(co, made)
    _killed_during(co, co.groups.DeleteVolumeGroupSnapshot, deletion)
    co.until_final(co.groups.DeleteVolumeGroupSnapshot, deletion)


@case(708, CREATE, NODE, RESTART)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_unpublish_to_delete_killed_midway_succeeds_when_retried(co: Co) -> None:
    """A driver that is killed while it unpublishes, unstages and deletes leaves nothing when the calls are
    retried.
    """
    volume = co.volume()
    target = co.use(volume)
    unpublish = csi_pb2.NodeUnpublishVolumeRequest(
        volume_id=volume.volume_id, target_path=str(target)
    )
    _killed_during(co, co.node.NodeUnpublishVolume, unpublish)
    co.unpublish(volume.volume_id, target)
    assert not co.host.mounts_at(target)
    assert not target.exists()
    if "node.STAGE_UNSTAGE_VOLUME" in co.has:
        unstage = csi_pb2.NodeUnstageVolumeRequest(
            volume_id=volume.volume_id, staging_target_path=str(co.staging(volume))
        )
        _killed_during(co, co.node.NodeUnstageVolume, unstage)
    co.unstage(volume)
    co.detach(volume.volume_id)
    delete = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
    _killed_during(co, co.controller.DeleteVolume, delete)
    co.until_final(co.controller.DeleteVolume, delete)
    validate = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id, volume_capabilities=[co.mount]
    )
    co.refused(co.controller.ValidateVolumeCapabilities, validate, Code.NOT_FOUND)


def _killed_during(co: Co, method: Any, request: Any) -> None:
    """The driver dies at a random point of the call; the retry must succeed wherever that was."""
    running = method.future(request, timeout=co.options.timeout_s)
    _restart(co)
    running.cancel()


def _restart(co: Co) -> None:
    """The operator's command kills the driver and starts it again; it serves when Probe says so."""
    restart_command.run(co.options.restart_command, co.options.timeout_s)
    co.until_ready(co.identity.Probe)
