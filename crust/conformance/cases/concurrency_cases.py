"""Concurrent callers, and callers that cancel (C-401 to C-416).

An identical call joins the running one, or is ABORTED; any other code means to a CO that the call failed.
"""

from typing import Any

import grpc

from crust.conformance.capabilities import CREATE, LIST_SNAPSHOTS, NODE, PUBLISH, STAGE
from crust.conformance.orchestrator import copies, expansion
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2

_CALLERS = 6
_GIVEN_UP_AFTER_S = (0.001, 0.005, 0.02)
_DATA = b"written before"


def test_c401_concurrent_identical_creates_make_one_volume(co: Co) -> None:
    answers = _joined(co, co.create_request())
    assert len({each.volume.volume_id for each in answers}) == 1


def test_c402_concurrent_creates_of_different_volumes_succeed(co: Co) -> None:
    requests = [co.create_request() for _ in range(_CALLERS)]
    answers = co.concurrently(requests)
    made = [each.volume.volume_id for each in answers if not isinstance(each, grpc.StatusCode)]
    assert len(made) == _CALLERS, answers
    assert len(set(made)) == _CALLERS


def test_c403_concurrent_identical_publishes_mount_once(co: Co) -> None:
    volume, target = co.staged()
    _joined(co, co.publish_request(volume, target))
    assert co.host.mounts_at(target) == 1
    _joined(co, co.unpublish_request(volume.volume_id, target))
    assert not co.host.mounts_at(target)


def test_c404_concurrent_create_and_delete_leave_volume_complete_or_deleted(co: Co) -> None:
    request = co.create_request()
    volume = co.create(request)
    delete = co.delete_request(volume.volume_id)
    deleting = co.begun(delete)
    co.concurrently([request] * 2)
    with co.should():
        assert deleting.code() in (Code.OK, Code.ABORTED), deleting.code()
    again = co.until_final(request).volume
    validate = co.validate_request(again, co.mount)
    assert co.ask(validate).HasField("confirmed")


def test_c405_cancelled_calls_succeed_when_retried(co: Co) -> None:
    request = co.create_request()
    _given_up(co, request)
    volume = co.until_final(request).volume
    co.attach(volume)
    staging = co.stage_request(volume)
    if STAGE in co.has:
        _given_up(co, staging)
    co.stage(volume)
    target = co.target()
    publish = co.publish_request(volume, target)
    _given_up(co, publish)
    co.until_final(publish)
    assert co.host.mounts_at(target) == 1


def test_c406_concurrent_identical_attaches_and_detaches_succeed(co: Co) -> None:
    volume = co.volume()
    _joined(co, co.attach_request(volume))
    detach = co.detach_request(volume.volume_id)
    _joined(co, detach)


def test_c407_concurrent_identical_stages_and_unstages_succeed(co: Co) -> None:
    volume = co.volume()
    co.attach(volume)
    _joined(co, co.stage_request(volume))
    unstage = co.unstage_request(volume)
    _joined(co, unstage)


def test_c408_concurrent_identical_snapshots_make_one_snapshot(co: Co) -> None:
    request = copies.snapshot_request(co, co.volume().volume_id)
    answers = _joined(co, request)
    made = copies.take(co, request)
    assert {each.snapshot.snapshot_id for each in answers} <= {made.snapshot_id}
    delete = csi_pb2.DeleteSnapshotRequest(snapshot_id=made.snapshot_id)
    _joined(co, delete)


def test_c409_concurrent_identical_group_snapshots_make_one_group(co: Co) -> None:
    request = copies.group_request(co, [co.volume().volume_id for _ in range(2)])
    answers = _joined(co, request)
    made = copies.take_group(co, request)
    assert {each.group_snapshot.group_snapshot_id for each in answers} <= {made.group_snapshot_id}
    _joined(co, copies.group_deletion(co, made))


def test_c410_concurrent_identical_controller_expansions_succeed(co: Co) -> None:
    request = expansion.controller_request(co, co.volume())
    for answer in _joined(co, request):
        assert answer.capacity_bytes >= request.capacity_range.required_bytes


def test_c411_concurrent_identical_node_expansions_succeed(co: Co) -> None:
    volume, target = co.used(file=_DATA)
    co.until_final(expansion.controller_request(co, volume))
    _joined(co, expansion.node_request(co, volume, target))
    assert co.file(target) == _DATA


def test_c412_concurrent_identical_deletes_succeed(co: Co) -> None:
    request = co.delete_request(co.volume().volume_id)
    _joined(co, request)


def test_c413_cancelled_snapshot_retried_makes_one_snapshot(co: Co) -> None:
    volume, target = co.used()
    request = copies.snapshot_request(co, volume.volume_id)
    _given_up(co, request)
    made = copies.take(co, request)
    co.host.write(target / "file", _DATA)
    if LIST_SNAPSHOTS in co.has:
        of_volume = csi_pb2.ListSnapshotsRequest(source_volume_id=volume.volume_id)
        listed = co.ask(of_volume).entries
        assert [each.snapshot.snapshot_id for each in listed] == [made.snapshot_id]


def test_c414_cancelled_expansion_retried_succeeds(co: Co) -> None:
    request = expansion.controller_request(co, co.volume())
    _given_up(co, request)
    answer = co.until_final(request)
    assert answer.capacity_bytes >= request.capacity_range.required_bytes


def test_c415_cancelled_unpublish_to_delete_retried_succeeds(co: Co) -> None:
    volume, target = co.used()
    unpublish = co.unpublish_request(volume.volume_id, target)
    unstage = co.unstage_request(volume)
    detach = co.detach_request(volume.volume_id)
    delete = co.delete_request(volume.volume_id)
    requests = ((NODE, unpublish), (STAGE, unstage), (PUBLISH, detach), (CREATE, delete))
    for needs, request in requests:
        if needs in co.has:
            _given_up(co, request)
            co.until_final(request)
    assert not co.host.mounts_at(target)
    assert not target.exists()


def test_c416_concurrent_different_calls_for_one_volume_succeed(co: Co) -> None:
    volume, _ = co.used(file=_DATA)
    snapshot = copies.snapshot_request(co, volume.volume_id)
    size = expansion.doubled(co, volume)
    clone = co.create_request(size_bytes=size, source=copies.of_volume(volume.volume_id))
    expand = expansion.controller_request(co, volume)
    _ok_or_aborted(co, co.concurrently([snapshot, clone, expand]))
    co.until_final(expand)
    copied = co.until_final(clone).volume
    made = copies.take(co, snapshot)
    restored = co.volume(source=copies.of_snapshot(made.snapshot_id), size_bytes=size)
    for each in (copied, restored):
        assert co.file(co.use(each)) == _DATA


def _joined(co: Co, request: Any) -> list[Any]:
    """The answers of all calls that were OK; the last one was sent alone."""
    answered = _ok_or_aborted(co, co.concurrently([request] * _CALLERS))
    return [*answered, co.until_final(request)]


def _ok_or_aborted(co: Co, answers: list[Any]) -> list[Any]:
    codes = {each for each in answers if isinstance(each, grpc.StatusCode)}
    with co.should():
        names = ", ".join(sorted(each.name for each in codes))
        assert codes <= {Code.ABORTED}, f"{names} for some of several calls at once"
    return [each for each in answers if not isinstance(each, grpc.StatusCode)]


def _given_up(co: Co, request: Any) -> None:
    for after_s in _GIVEN_UP_AFTER_S:
        co.abandoned(request, after_s)
