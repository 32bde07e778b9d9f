"""Every RPC that changes something, called several times at once, cancelled and called again (C-406 to C-416).

An identical call joins the running one, or is ABORTED; any other code means to a CO that the call failed.
"""

from collections.abc import Callable
from typing import Any

import grpc

from crust.conformance.case import (
    CLONE,
    CREATE,
    EXPAND,
    GROUP,
    LIST_SNAPSHOTS,
    NODE,
    NODE_EXPAND,
    ONLINE,
    PUBLISH,
    SNAPSHOT,
    STAGE,
    case,
    must,
    should,
)
from crust.conformance.orchestrator import copies, expansion
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2

_CALLERS = 6
_GIVEN_UP_AFTER_S = (0.001, 0.005, 0.02)
_DATA = b"written before"


@case(406, CREATE, PUBLISH, NODE)
@must("ControllerPublishVolume, ControllerUnpublishVolume", "these operations MUST be idempotent")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_identical_attaches_and_detaches_succeed(co: Co) -> None:
    """Concurrency: equal ControllerPublishVolume calls at once, and equal ControllerUnpublishVolume calls, are
    OK or ABORTED.
    """
    volume = co.volume()
    _joined(co, co.controller.ControllerPublishVolume, co.attach_request(volume))
    detach = csi_pb2.ControllerUnpublishVolumeRequest(
        volume_id=volume.volume_id, node_id=co.node_id()
    )
    _joined(co, co.controller.ControllerUnpublishVolume, detach)


@case(407, CREATE, STAGE)
@must("NodeStageVolume, NodeUnstageVolume", "these operations MUST be idempotent")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_identical_stages_and_unstages_succeed(co: Co) -> None:
    """Concurrency: equal NodeStageVolume calls at once, and equal NodeUnstageVolume calls, are OK or ABORTED."""
    volume = co.volume()
    co.attach(volume)
    _joined(co, co.node.NodeStageVolume, co.stage_request(volume))
    unstage = csi_pb2.NodeUnstageVolumeRequest(
        volume_id=volume.volume_id, staging_target_path=str(co.staging(volume))
    )
    _joined(co, co.node.NodeUnstageVolume, unstage)


@case(408, CREATE, SNAPSHOT)
@must("CreateSnapshot, DeleteSnapshot", "these operations MUST be idempotent")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_identical_snapshots_make_one_snapshot(co: Co) -> None:
    """Concurrency: equal CreateSnapshot calls at once are one snapshot or ABORTED; equal DeleteSnapshot calls
    are OK or ABORTED.
    """
    request = copies.snapshot_request(co, co.volume().volume_id)
    answers = _joined(co, co.controller.CreateSnapshot, request)
    made = copies.take(co, request)
    assert {each.snapshot.snapshot_id for each in answers} <= {made.snapshot_id}
    delete = csi_pb2.DeleteSnapshotRequest(snapshot_id=made.snapshot_id)
    _joined(co, co.controller.DeleteSnapshot, delete)


@case(409, CREATE, GROUP)
@must("CreateVolumeGroupSnapshot, DeleteVolumeGroupSnapshot", "these operations MUST be idempotent")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_identical_group_snapshots_make_one_group(co: Co) -> None:
    """Concurrency: equal CreateVolumeGroupSnapshot calls at once are one group or ABORTED; equal
    DeleteVolumeGroupSnapshot calls are OK or ABORTED.
    """
    request = copies.group_request(co, [co.volume().volume_id for _ in range(2)])
    answers = _joined(co, co.groups.CreateVolumeGroupSnapshot, request)
    made = copies.take_group(co, request)
    assert {each.group_snapshot.group_snapshot_id for each in answers} <= {made.group_snapshot_id}
    _joined(co, co.groups.DeleteVolumeGroupSnapshot, copies.group_deletion(co, made))


@case(410, CREATE, EXPAND)
@must("ControllerExpandVolume", "this operation MUST be idempotent")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_identical_controller_expansions_succeed(co: Co) -> None:
    """Concurrency: equal ControllerExpandVolume calls at once are OK or ABORTED, and the volume grows once."""
    request = expansion.controller_request(co, co.volume())
    for answer in _joined(co, co.controller.ControllerExpandVolume, request):
        assert answer.capacity_bytes >= request.capacity_range.required_bytes


@case(411, CREATE, EXPAND, NODE_EXPAND, ONLINE)
@must("NodeExpandVolume", "this operation MUST be idempotent")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_identical_node_expansions_succeed(co: Co) -> None:
    """Concurrency: equal NodeExpandVolume calls at once are OK or ABORTED, and the files are kept."""
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", _DATA)
    co.until_final(co.controller.ControllerExpandVolume, expansion.controller_request(co, volume))
    _joined(co, co.node.NodeExpandVolume, expansion.node_request(co, volume, target))
    assert co.host.read(target / "file", 99) == _DATA


@case(412, CREATE)
@must("DeleteVolume", "this operation MUST be idempotent")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_identical_deletes_succeed(co: Co) -> None:
    """Concurrency: equal DeleteVolume calls at once are OK or ABORTED."""
    request = csi_pb2.DeleteVolumeRequest(volume_id=co.volume().volume_id)
    _joined(co, co.controller.DeleteVolume, request)


@case(413, CREATE, SNAPSHOT, NODE)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_cancelled_snapshot_retried_makes_one_snapshot(co: Co) -> None:
    """Timeouts: a cancelled CreateSnapshot ends by itself; sent again it is OK, and the volume can
    be written.
    """
    volume = co.volume()
    target = co.use(volume)
    request = copies.snapshot_request(co, volume.volume_id)
    _given_up(co, co.controller.CreateSnapshot, request)
    made = copies.take(co, request)
    co.host.write(target / "file", _DATA)
    if LIST_SNAPSHOTS in co.has:
        of_volume = csi_pb2.ListSnapshotsRequest(source_volume_id=volume.volume_id)
        listed = co.ask(co.controller.ListSnapshots, of_volume).entries
        assert [each.snapshot.snapshot_id for each in listed] == [made.snapshot_id]


@case(414, CREATE, EXPAND)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_cancelled_expansion_retried_succeeds(co: Co) -> None:
    """Timeouts: a cancelled ControllerExpandVolume ends by itself; sent again it is OK."""
    request = expansion.controller_request(co, co.volume())
    _given_up(co, co.controller.ControllerExpandVolume, request)
    answer = co.until_final(co.controller.ControllerExpandVolume, request)
    assert answer.capacity_bytes >= request.capacity_range.required_bytes


@case(415, CREATE, NODE)
@must("Timeouts", "idempotency: a retried call with the same fields continues where it left off")
def test_cancelled_unpublish_to_delete_retried_succeeds(co: Co) -> None:
    """Timeouts: cancelled NodeUnpublishVolume, NodeUnstageVolume, ControllerUnpublishVolume and DeleteVolume
    calls end by themselves; sent again they are OK.
    """
    volume = co.volume()
    target = co.use(volume)
    unpublish = csi_pb2.NodeUnpublishVolumeRequest(
        volume_id=volume.volume_id, target_path=str(target)
    )
    unstage = csi_pb2.NodeUnstageVolumeRequest(
        volume_id=volume.volume_id, staging_target_path=str(co.staging(volume))
    )
    detach = csi_pb2.ControllerUnpublishVolumeRequest(
        volume_id=volume.volume_id, node_id=co.node_id()
    )
    delete = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
    calls: list[tuple[str, Any, Any]] = [
        (NODE, co.node.NodeUnpublishVolume, unpublish),
        (STAGE, co.node.NodeUnstageVolume, unstage),
        (PUBLISH, co.controller.ControllerUnpublishVolume, detach),
        (CREATE, co.controller.DeleteVolume, delete),
    ]
    for needs, method, request in calls:
        if needs in co.has:
            _given_up(co, method, request)
            co.until_final(method, request)
    assert not co.host.mounts_at(target)
    assert not target.exists()


@case(416, CREATE, SNAPSHOT, CLONE, EXPAND, NODE, ONLINE)
@must(
    "CreateSnapshot, CreateVolume, ControllerExpandVolume",
    "these operations MUST be idempotent; the copies contain the data of their source",
)
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_different_calls_for_one_volume_succeed(co: Co) -> None:
    """Concurrency: a snapshot, a clone and an expansion of one volume at once are each OK or ABORTED; sent
    again each is OK, and no byte is lost.
    """
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", _DATA)
    snapshot = copies.snapshot_request(co, volume.volume_id)
    size = 2 * (volume.capacity_bytes or co.options.parameters.size_bytes)
    clone = co.create_request(size_bytes=size, source=copies.of_volume(volume.volume_id))
    expand = expansion.controller_request(co, volume)
    calls: list[tuple[Any, Any]] = [
        (co.controller.CreateSnapshot, snapshot),
        (co.controller.CreateVolume, clone),
        (co.controller.ControllerExpandVolume, expand),
    ]
    _ok_or_aborted(co, co.concurrently(calls))
    co.until_final(co.controller.ControllerExpandVolume, expand)
    copied = co.until_final(co.controller.CreateVolume, clone).volume
    made = copies.take(co, snapshot)
    restored = co.volume(source=copies.of_snapshot(made.snapshot_id), size_bytes=size)
    for each in (copied, restored):
        assert co.host.read(co.use(each) / "file", 99) == _DATA


def _joined(co: Co, method: Callable[..., Any], request: Any) -> list[Any]:
    """The answers of all calls that were OK; the last one was sent alone."""
    answered = _ok_or_aborted(co, co.concurrently([(method, request)] * _CALLERS))  # type: ignore[list-item]
    return [*answered, co.until_final(method, request)]  # type: ignore[arg-type]


def _ok_or_aborted(co: Co, answers: list[Any]) -> list[Any]:
    codes = {each for each in answers if isinstance(each, grpc.StatusCode)}
    with co.should():
        names = ", ".join(sorted(each.name for each in codes))
        assert codes <= {Code.ABORTED}, f"{names} for some of several calls at once"
    return [each for each in answers if not isinstance(each, grpc.StatusCode)]


def _given_up(co: Co, method: Callable[..., Any], request: Any) -> None:
    for after_s in _GIVEN_UP_AFTER_S:
        co.abandoned(method, request, after_s)  # type: ignore[arg-type]
