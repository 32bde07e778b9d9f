"""Concurrent callers, and callers that cancel (C-401 to C-405)."""

from collections.abc import Sequence

import grpc

from crust.conformance.case import CREATE, NODE, beyond, case, must, should
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2

_CALLERS = 6


@case(401, CREATE)
@must("CreateVolume", "this operation MUST be idempotent: a name is one volume")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_identical_creates_make_one_volume(co: Co) -> None:
    """Concurrency: equal CreateVolume calls at once are the same volume, or ABORTED and then the same when
    sent again.
    """
    request = co.create_request()
    answers = co.concurrently([(co.controller.CreateVolume, request)] * _CALLERS)
    volume = co.until_final(co.controller.CreateVolume, request).volume
    with co.should():
        _all_joined(answers)
    for answer in answers:
        assert isinstance(answer, grpc.StatusCode) or answer.volume.volume_id == volume.volume_id


@case(402, CREATE)
@beyond(
    "Concurrency",
    "ABORTED is for the specified volume; calls for others are none of its matter",
)
def test_concurrent_creates_of_different_volumes_succeed(co: Co) -> None:
    """Concurrency: calls for different volumes do not block each other."""
    requests = [co.create_request() for _ in range(_CALLERS)]
    answers = co.concurrently([(co.controller.CreateVolume, each) for each in requests])
    made = [each.volume.volume_id for each in answers if not isinstance(each, grpc.StatusCode)]
    assert len(made) == _CALLERS, answers
    assert len(set(made)) == _CALLERS


@case(403, CREATE, NODE)
@must("NodePublishVolume, NodeUnpublishVolume", "these operations MUST be idempotent")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_identical_publishes_mount_once(co: Co) -> None:
    """Concurrency: equal NodePublishVolume calls at once mount once; equal NodeUnpublishVolume calls
    unmount it.
    """
    volume = co.volume()
    co.stage(volume)
    target = co.target()
    request = co.publish_request(volume, target)
    answers = co.concurrently([(co.node.NodePublishVolume, request)] * _CALLERS)
    with co.should():
        _all_joined(answers)
    co.until_final(co.node.NodePublishVolume, request)
    assert co.host.mounts_at(target) == 1
    away = csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume.volume_id, target_path=str(target))
    ended = co.concurrently([(co.node.NodeUnpublishVolume, away)] * _CALLERS)
    with co.should():
        _all_joined(ended)
    co.until_final(co.node.NodeUnpublishVolume, away)
    assert not co.host.mounts_at(target)


@case(404, CREATE)
@must("CreateVolume", "this operation MUST be idempotent")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_create_and_delete_leave_volume_complete_or_deleted(co: Co) -> None:
    """Concurrency: a DeleteVolume beside a CreateVolume of the same volume leaves it either complete or deleted,
    and the CO can go on.
    """
    request = co.create_request()
    volume = co.create(request)
    delete = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
    deleting = co.controller.DeleteVolume.future(delete, timeout=co.options.timeout_s)
    co.concurrently([(co.controller.CreateVolume, request)] * 2)
    with co.should():
        assert deleting.exception() is None or _code(deleting) is Code.ABORTED, _code(deleting)
    again = co.until_final(co.controller.CreateVolume, request).volume
    validate = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id=again.volume_id, volume_capabilities=[co.mount]
    )
    assert co.ask(co.controller.ValidateVolumeCapabilities, validate).HasField("confirmed")


@case(405, CREATE, NODE)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_cancelled_calls_succeed_when_retried(co: Co) -> None:
    """Timeouts: a cancelled call ends by itself; sent again it is OK, and nothing is done twice."""
    request = co.create_request()
    for after_s in (0.001, 0.005, 0.02):
        co.abandoned(co.controller.CreateVolume, request, after_s)
    volume = co.until_final(co.controller.CreateVolume, request).volume
    co.attach(volume)
    staging = co.stage_request(volume)
    for after_s in (0.001, 0.005, 0.02):
        if "node.STAGE_UNSTAGE_VOLUME" in co.has:
            co.abandoned(co.node.NodeStageVolume, staging, after_s)
    co.stage(volume)
    target = co.target()
    publish = co.publish_request(volume, target)
    for after_s in (0.001, 0.005, 0.02):
        co.abandoned(co.node.NodePublishVolume, publish, after_s)
    co.until_final(co.node.NodePublishVolume, publish)
    assert co.host.mounts_at(target) == 1


def _all_joined(answers: Sequence[object]) -> None:
    for answer in answers:
        if isinstance(answer, grpc.StatusCode):
            assert answer is Code.ABORTED, f"{answer} for an identical call that was running"


def _code(future: grpc.Call) -> grpc.StatusCode:
    return future.code()
