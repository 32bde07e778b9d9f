"""A driver that is killed between any two calls, and during them (C-701 to C-708)."""

from typing import Any

from crust.conformance import copies, growth, restarting
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
)
from crust.conformance.co import Co, Code
from crust.wire.csi.v1 import csi_pb2

_DATA = b"written before the crash"


@case(701, CREATE, NODE, RESTART)
def test_a_crash_between_any_two_calls_is_not_noticed(co: Co) -> None:
    """A lifecycle with a restart after every call goes on as without: everything is remembered, nothing is
    lost.
    """
    request = co.create_request()
    volume = co.create(request)
    _restart(co)
    assert co.finally_(co.controller.CreateVolume, request).volume == volume
    co.stage(volume)
    _restart(co)
    target = co.publish(volume)
    co.sight.write(target / "file", _DATA)
    _restart(co)
    assert co.sight.read(target / "file", 99) == _DATA
    co.finally_(co.node.NodePublishVolume, co.publish_request(volume, target))
    assert co.sight.mounts_at(target) == 1
    co.unpublish(volume.volume_id, target)
    assert not co.sight.mounts_at(target)
    _restart(co)
    co.unpublish(volume.volume_id, target)
    co.unstage(volume)
    _restart(co)
    co.unstage(volume)
    co.detach(volume.volume_id)
    _restart(co)
    assert co.sight.read(co.use(volume) / "file", 99) == _DATA


@case(702, CREATE, NODE, RESTART)
def test_a_crash_during_a_call_is_mended_by_the_retry(co: Co) -> None:
    """A driver that is killed while it creates, stages and publishes ends where the retries lead, once."""
    requests = [co.create_request() for _ in range(4)]
    futures = [co.controller.CreateVolume.future(each, timeout=10) for each in requests]
    _restart(co)
    for future in futures:
        future.cancel()
    volumes = [co.made(co.finally_(co.controller.CreateVolume, each).volume) for each in requests]
    assert len({each.volume_id for each in volumes}) == len(requests)
    volume = volumes[0]
    co.attach(volume)
    target = co.target()
    co.undo(lambda: co.unstage(volume))
    if "node.STAGE_UNSTAGE_VOLUME" in co.has:
        _killed_during(co, co.node.NodeStageVolume, co.stage_request(volume))
    co.stage(volume)
    co.will_unpublish(volume.volume_id, target)
    publish = co.publish_request(volume, target)
    _killed_during(co, co.node.NodePublishVolume, publish)
    co.finally_(co.node.NodePublishVolume, publish)
    assert co.sight.mounts_at(target) == 1
    co.sight.write(target / "file", _DATA)


@case(703, CREATE, SNAPSHOT, NODE, RESTART)
def test_a_crash_during_a_snapshot_leaves_the_volume_usable(co: Co) -> None:
    """A driver that is killed while it takes a snapshot leaves no frozen filesystem; the retry is a whole
    snapshot.
    """
    volume = co.volume()
    target = co.use(volume)
    co.sight.write(target / "file", _DATA)
    request = copies.snapshot_request(co, volume.volume_id)
    _killed_during(co, co.controller.CreateSnapshot, request)
    co.sight.write(target / "other", _DATA)
    made = copies.take(co, request)
    restored = co.volume(source=copies.of_snapshot(made.snapshot_id))
    assert co.sight.read(co.use(restored) / "file", 99) == _DATA


@case(704, CREATE, SNAPSHOT, NODE, RESTART)
def test_a_crash_between_snapshot_and_restore_is_not_noticed(co: Co) -> None:
    """A snapshot, a restore and their removal with a restart between any two calls go on as without."""
    volume = co.volume()
    target = co.use(volume)
    co.sight.write(target / "file", _DATA)
    request = copies.snapshot_request(co, volume.volume_id)
    made = copies.take(co, request)
    _restart(co)
    assert co.finally_(co.controller.CreateSnapshot, request).snapshot == made
    co.sight.write(target / "file", b"something else altogether")
    create = co.create_request(source=copies.of_snapshot(made.snapshot_id))
    restored = co.create(create)
    _restart(co)
    assert co.finally_(co.controller.CreateVolume, create).volume == restored
    copies.delete(co, made.snapshot_id)
    _restart(co)
    copies.delete(co, made.snapshot_id)
    assert co.sight.read(co.use(restored) / "file", 99) == _DATA


@case(705, CREATE, CLONE, NODE, RESTART)
def test_a_crash_around_a_clone_is_not_noticed(co: Co) -> None:
    """A driver that is killed while it clones, and after that: the retry is the whole clone, and the source
    can be written.
    """
    volume = co.volume()
    target = co.use(volume)
    co.sight.write(target / "file", _DATA)
    request = co.create_request(source=copies.of_volume(volume.volume_id))
    _killed_during(co, co.controller.CreateVolume, request)
    clone = co.made(co.finally_(co.controller.CreateVolume, request).volume)
    _restart(co)
    assert co.finally_(co.controller.CreateVolume, request).volume == clone
    co.sight.write(target / "file", b"something else altogether")
    assert co.sight.read(co.use(clone) / "file", 99) == _DATA


@case(706, CREATE, EXPAND, NODE_EXPAND, ONLINE, NODE, RESTART)
def test_a_crash_around_an_expansion_is_not_noticed(co: Co) -> None:
    """A driver that is killed during either half of an expansion, and between them: the retries end at the
    size, and the files are kept.
    """
    volume = co.volume()
    target = co.use(volume)
    co.sight.write(target / "file", _DATA)
    before = co.sight.size_bytes(target)
    halves: list[tuple[Any, Any]] = [
        (co.controller.ControllerExpandVolume, growth.of(co, volume)),
        (co.node.NodeExpandVolume, growth.on_the_node(co, volume, target)),
    ]
    for call, request in halves:
        _killed_during(co, call, request)
        co.finally_(call, request)
    _restart(co)
    assert co.sight.size_bytes(target) >= 1.6 * before
    assert co.sight.read(target / "file", 99) == _DATA


@case(707, CREATE, GROUP, NODE, RESTART)
def test_a_crash_around_a_group_is_not_noticed(co: Co) -> None:
    """A driver that is killed while it takes a group snapshot, and after that: nothing stays frozen, and the
    retry is the whole group, which stays the same.
    """
    volumes = [co.volume() for _ in range(2)]
    targets = [co.use(each) for each in volumes]
    for target in targets:
        co.sight.write(target / "file", _DATA)
    request = copies.group_request(co, [each.volume_id for each in volumes])
    _killed_during(co, co.groups.CreateVolumeGroupSnapshot, request)
    for target in targets:
        co.sight.write(target / "other", _DATA)
    made = copies.take_group(co, request)
    _restart(co)
    assert copies.take_group(co, request) == made
    for member in made.snapshots:
        restored = co.volume(source=copies.of_snapshot(member.snapshot_id))
        assert co.sight.read(co.use(restored) / "file", 99) == _DATA
    deletion = copies.group_deletion(co, made)
    _killed_during(co, co.groups.DeleteVolumeGroupSnapshot, deletion)
    co.finally_(co.groups.DeleteVolumeGroupSnapshot, deletion)


@case(708, CREATE, NODE, RESTART)
def test_a_crash_while_taking_back_is_mended_by_the_retry(co: Co) -> None:
    """A driver that is killed while it unpublishes, unstages and deletes ends where the retries lead, with
    nothing left.
    """
    volume = co.volume()
    target = co.use(volume)
    unpublish = csi_pb2.NodeUnpublishVolumeRequest(
        volume_id=volume.volume_id, target_path=str(target)
    )
    _killed_during(co, co.node.NodeUnpublishVolume, unpublish)
    co.unpublish(volume.volume_id, target)
    assert not co.sight.mounts_at(target)
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
    co.finally_(co.controller.DeleteVolume, delete)
    validate = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=volume.volume_id, volume_capabilities=[co.mount]
    )
    co.refused(co.controller.ValidateVolumeCapabilities, validate, Code.NOT_FOUND)


def _killed_during(co: Co, method: Any, request: Any) -> None:
    """Where in the call the driver dies is left to chance; the retry must not care."""
    running = method.future(request, timeout=co.options.timeout_s)
    _restart(co)
    running.cancel()


def _restart(co: Co) -> None:
    """The operator's command kills the driver and starts it again; the socket answers when Probe does."""
    restarting.run(co.options.restart_command, co.options.timeout_s)
    co.finally_(co.identity.Probe, csi_pb2.ProbeRequest())
