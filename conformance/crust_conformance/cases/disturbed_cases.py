"""Overlapping and cancelled calls, and calls that a kill of the driver interrupts (C-401 to C-416, C-701 to C-709).

An identical call joins the running one, or is ABORTED; any other code means to a CO that the call failed. The retry
of a disturbed call succeeds.
"""

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator import copies, expansion, undo
from crust_conformance.orchestrator.calls import Code
from crust_conformance.orchestrator.capabilities import CREATE, LIST_SNAPSHOTS, NODE, PUBLISH, STAGE
from crust_conformance.orchestrator.co import Co

_CALLERS = 6
_GIVEN_UP_AFTER_S = (0.001, 0.005, 0.02)
_DATA = b"written before"
_PRINTED_BYTES = 2000


def test_c401_concurrent_identical_creates_make_one_volume(co: Co) -> None:
    answers = _joined(co, co.create_request())
    assert len({answer.volume.volume_id for answer in answers}) == 1


def test_c402_concurrent_creates_of_different_volumes_succeed(co: Co) -> None:
    requests = [co.create_request() for _ in range(_CALLERS)]
    answers = co.concurrently(requests)
    ids = [answer.volume.volume_id for answer in answers if not isinstance(answer, grpc.StatusCode)]
    assert len(ids) == _CALLERS, answers
    assert len(set(ids)) == _CALLERS


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
        answered = deleting.code()
        assert answered in (Code.OK, Code.ABORTED), f"DeleteVolume was answered {answered.name}"
    second = co.until_final(request).volume
    validate = co.validate_request(second, co.mount)
    assert co.ask(validate).HasField("confirmed")


def test_c405_cancelled_calls_succeed_when_retried(co: Co) -> None:
    request = co.create_request()
    _given_up(co, request)
    _used(co, co.until_final(request).volume, _given_up)


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
    snapshot = copies.take(co, request)
    assert {answer.snapshot.snapshot_id for answer in answers} <= {snapshot.snapshot_id}
    delete = csi_pb2.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id)
    _joined(co, delete)


def test_c409_concurrent_identical_group_snapshots_make_one_group(co: Co) -> None:
    request = copies.group_request(co, [co.volume().volume_id for _ in range(2)])
    answers = _joined(co, request)
    group = copies.take_group(co, request)
    assert {answer.group_snapshot.group_snapshot_id for answer in answers} <= {
        group.group_snapshot_id
    }
    _joined(co, undo.group_deletion(group))


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
    snapshot = copies.take(co, request)
    co.host.write(target / "file", _DATA)
    if LIST_SNAPSHOTS in co.has:
        of_volume = csi_pb2.ListSnapshotsRequest(source_volume_id=volume.volume_id)
        listed = co.ask(of_volume).entries
        assert [entry.snapshot.snapshot_id for entry in listed] == [snapshot.snapshot_id]


def test_c414_cancelled_expansion_retried_succeeds(co: Co) -> None:
    request = expansion.controller_request(co, co.volume())
    _given_up(co, request)
    answer = co.until_final(request)
    assert answer.capacity_bytes >= request.capacity_range.required_bytes


def test_c415_cancelled_unpublish_to_delete_retried_succeeds(co: Co) -> None:
    _deleted(co, _given_up)


def test_c416_concurrent_different_calls_for_one_volume_succeed(co: Co) -> None:
    volume, _ = co.used(file=_DATA)
    snapshot = copies.snapshot_request(co, volume.volume_id)
    size = expansion.doubled(co, volume)
    clone = co.create_request(size_bytes=size, source=copies.of_volume(volume.volume_id))
    expand = expansion.controller_request(co, volume)
    _ok_or_aborted(co, co.concurrently([snapshot, clone, expand]))
    co.until_final(expand)
    copied = co.until_final(clone).volume
    taken_snapshot = copies.take(co, snapshot)
    restored = co.volume(source=copies.of_snapshot(taken_snapshot.snapshot_id), size_bytes=size)
    for copy in (copied, restored):
        assert co.file(co.use(copy)) == _DATA


def _joined(co: Co, request: Any) -> list[Any]:
    """The answers of all calls that were OK; the last one was sent alone."""
    answered = _ok_or_aborted(co, co.concurrently([request] * _CALLERS))
    return [*answered, co.until_final(request)]


def _ok_or_aborted(co: Co, answers: list[Any]) -> list[Any]:
    codes = {answer for answer in answers if isinstance(answer, grpc.StatusCode)}
    with co.should():
        names = ", ".join(sorted(code.name for code in codes))
        assert codes <= {Code.ABORTED}, f"{names} for some of several calls at once"
    return [answer for answer in answers if not isinstance(answer, grpc.StatusCode)]


def _used(co: Co, volume: csi_pb2.Volume, disturb: Callable[[Co, Any], None]) -> Path:
    """The target of the volume, published by calls that are disturbed and then retried."""
    co.attach(volume)
    if STAGE in co.has:
        disturb(co, co.stage_request(volume))
    co.stage(volume)
    target = co.target()
    publish = co.publish_request(volume, target)
    disturb(co, publish)
    co.until_final(publish)
    assert co.host.mounts_at(target) == 1
    return target


def _deleted(co: Co, disturb: Callable[[Co, Any], None]) -> csi_pb2.Volume:
    """A volume that was published, then deleted, by calls that are disturbed and then retried."""
    volume, target = co.used()
    requests = (
        (NODE, co.unpublish_request(volume.volume_id, target)),
        (STAGE, co.unstage_request(volume)),
        (PUBLISH, co.detach_request(volume.volume_id)),
        (CREATE, co.delete_request(volume.volume_id)),
    )
    for needs, request in requests:
        if needs in co.has:
            disturb(co, request)
            co.until_final(request)
    assert not co.host.mounts_at(target)
    assert not co.host.has(target)
    return volume


def _given_up(co: Co, request: Any) -> None:
    for after_s in _GIVEN_UP_AFTER_S:
        co.abandoned(request, after_s)


def test_c701_lifecycle_survives_restart_after_each_call(co: Co) -> None:
    request = co.create_request()
    volume = co.create(request)
    _restart(co)
    second = co.until_final(request).volume
    assert second.volume_id == volume.volume_id
    co.stage(volume)
    _restart(co)
    target = co.publish(volume)
    co.host.write(target / "file", _DATA)
    _restart(co)
    assert co.file(target) == _DATA
    co.until_final(co.publish_request(volume, target))
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
    assert co.file(co.use(volume)) == _DATA


def test_c702_calls_killed_midway_succeed_when_retried(co: Co) -> None:
    requests = [co.create_request() for _ in range(4)]
    futures = [co.begun(request, 10) for request in requests]
    _restart(co)
    for future in futures:
        future.cancel()
    volumes = [co.until_final(request).volume for request in requests]
    assert len({volume.volume_id for volume in volumes}) == len(requests)
    co.host.write(_used(co, volumes[0], _killed_during) / "file", _DATA)


def test_c703_a_crash_during_a_snapshot_leaves_the_volume_usable(co: Co) -> None:
    volume, target = co.used(file=_DATA)
    request = copies.snapshot_request(co, volume.volume_id)
    _killed_during(co, request)
    co.host.write(target / "other", _DATA)
    snapshot = copies.take(co, request)
    restored = co.volume(source=copies.of_snapshot(snapshot.snapshot_id))
    assert co.file(co.use(restored)) == _DATA


def test_c704_snapshot_and_restore_survive_restart_after_each_call(co: Co) -> None:
    volume, target = co.used(file=_DATA)
    request = copies.snapshot_request(co, volume.volume_id)
    snapshot = copies.take(co, request)
    _restart(co)
    second = co.until_final(request).snapshot
    assert second.snapshot_id == snapshot.snapshot_id
    assert second.creation_time == snapshot.creation_time
    co.host.write(target / "file", b"something else altogether")
    create = co.create_request(source=copies.of_snapshot(snapshot.snapshot_id))
    restored = co.create(create)
    _restart(co)
    once_more = co.until_final(create).volume
    assert once_more.volume_id == restored.volume_id
    copies.delete(co, snapshot.snapshot_id)
    _restart(co)
    copies.delete(co, snapshot.snapshot_id)
    assert co.file(co.use(restored)) == _DATA


def test_c705_clone_killed_midway_succeeds_when_retried(co: Co) -> None:
    volume, target = co.used(file=_DATA)
    request = co.create_request(source=copies.of_volume(volume.volume_id))
    _killed_during(co, request)
    clone = co.until_final(request).volume
    _restart(co)
    second = co.until_final(request).volume
    assert second.volume_id == clone.volume_id
    co.host.write(target / "file", b"something else altogether")
    assert co.file(co.use(clone)) == _DATA


def test_c706_expansion_killed_midway_succeeds_when_retried(co: Co) -> None:
    volume, target = co.used(file=_DATA)
    sized, size_before = expansion.has_its_own_size(co, volume, target), co.host.size_bytes(target)
    halves: tuple[Any, ...] = (
        expansion.controller_request(co, volume),
        expansion.node_request(co, volume, target),
    )
    for request in halves:
        _killed_during(co, request)
        co.until_final(request)
    _restart(co)
    assert not sized or co.host.size_bytes(target) >= 1.6 * size_before
    assert co.file(target) == _DATA


def test_c707_group_snapshot_killed_midway_succeeds_when_retried(co: Co) -> None:
    volumes = [co.volume() for _ in range(2)]
    targets = [co.use(volume) for volume in volumes]
    for target in targets:
        co.host.write(target / "file", _DATA)
    request = copies.group_request(co, [volume.volume_id for volume in volumes])
    _killed_during(co, request)
    for target in targets:
        co.host.write(target / "other", _DATA)
    group = copies.take_group(co, request)
    _restart(co)
    assert copies.members(copies.take_group(co, request)) == copies.members(group)
    for member in group.snapshots:
        restored = co.volume(source=copies.of_snapshot(member.snapshot_id))
        assert co.file(co.use(restored)) == _DATA
    deletion = undo.group_deletion(group)
    _killed_during(co, deletion)
    co.until_final(deletion)


def test_c708_unpublish_to_delete_killed_midway_succeeds_when_retried(co: Co) -> None:
    volume = _deleted(co, _killed_during)
    co.answered(co.validate_request(volume, co.mount), Code.NOT_FOUND)


def test_c709_deferred_publish_killed_midway_succeeds_when_retried(co: Co) -> None:
    volume, target = co.staged()
    publish = co.publish_request(volume, target)
    publish.defer_fs_ops = True
    _killed_during(co, publish, metadata=extensions.METADATA)
    first = co.deferred(publish).deferred_mount
    assert first.HasField("block_device") or first.HasField("network_image"), "it has no source"
    _restart(co)
    second = co.deferred(publish).deferred_mount
    assert second.block_device == first.block_device, "the retry has another device"
    assert not co.host.mounts_at(target), "the retry has mounted the volume"
    unpublish = co.unpublish_request(volume.volume_id, target)
    _killed_during(co, unpublish)
    co.until_final(unpublish)
    co.unstage(volume)
    co.detach(volume.volume_id)
    co.delete(volume.volume_id)


def _killed_during(co: Co, request: Any, **options: Any) -> None:
    """Kill the driver at a random point of the call; the retry must succeed at every point."""
    running = co.begun(request, **options)
    _restart(co)
    running.cancel()


def _restart(co: Co) -> None:
    """Kill and start the driver by the operator's command; wait until Probe is ready."""
    run_restart_command(co.options.restart_command, co.options.timeout_s)
    co.until_ready()


def run_restart_command(command: str, timeout_s: float) -> None:
    """Run it with `sh -c`, to its end. Raises AssertionError, with its output, if it fails or takes too long.

    The started driver inherits the command's output, so the output goes to a file: a reader of a pipe would wait for
    the driver's end.
    """
    with tempfile.TemporaryFile() as output:
        try:
            ended = subprocess.run(
                ["/bin/sh", "-c", command],
                check=False,
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            how = f"ended with {ended.returncode}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            how = f"did not return within {timeout_s:g} s"
        output.seek(0)
        printed = output.read().decode(errors="replace")[-_PRINTED_BYTES:].strip()
    assert not how, f"the restart command {how}: {printed or 'it printed nothing'}"
