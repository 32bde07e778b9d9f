"""Group snapshots (C-341 to C-346)."""

import struct
import threading

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator import copies, undo
from crust_conformance.orchestrator.calls import UNKNOWN, Code
from crust_conformance.orchestrator.co import Co

_COUNTER = struct.Struct("<Q")


def test_c341_a_group_needs_a_name_and_sources(co: Co) -> None:
    request = copies.group_request(co, [co.volume().volume_id])
    co.refused_without(request, "name", "source_volume_ids")
    request.source_volume_ids.append(UNKNOWN)
    with co.beyond():
        co.answered(request, Code.NOT_FOUND)


def test_c342_a_group_has_one_snapshot_of_each_volume(co: Co) -> None:
    ids = [co.volume().volume_id for _ in range(2)]
    request = copies.group_request(co, ids)
    first, second = copies.take_group(co, request), copies.take_group(co, request)
    assert copies.members(first) == copies.members(second)
    assert sorted(snapshot.source_volume_id for snapshot in first.snapshots) == sorted(ids)
    assert {snapshot.group_snapshot_id for snapshot in first.snapshots} == {first.group_snapshot_id}
    request.source_volume_ids.append(co.volume().volume_id)
    co.answered(request, Code.ALREADY_EXISTS)


def test_c343_get_group_returns_group_as_created(co: Co) -> None:
    group = _group(co, 1)
    request = _look(group)
    assert copies.members(co.ask(request).group_snapshot) == copies.members(group)
    request.snapshot_ids.append(UNKNOWN)
    with co.should():
        co.answered(request, Code.INVALID_ARGUMENT)
    unknown = csi_pb2.GetVolumeGroupSnapshotRequest(
        group_snapshot_id=UNKNOWN, snapshot_ids=[UNKNOWN]
    )
    co.answered(unknown, Code.NOT_FOUND)
    co.refused_without(unknown, "group_snapshot_id")


def test_c344_delete_of_group_member_is_invalid(co: Co) -> None:
    group = _group(co, 2)
    request = csi_pb2.DeleteSnapshotRequest(snapshot_id=group.snapshots[0].snapshot_id)
    if co.answered(request, Code.OK, Code.INVALID_ARGUMENT) is Code.OK:
        return
    assert copies.members(co.ask(_look(group)).group_snapshot) == copies.members(group)


def test_c345_group_deletion_is_complete_and_idempotent(co: Co) -> None:
    group = _group(co, 1)
    request = undo.group_deletion(group)
    request.snapshot_ids.append(UNKNOWN)
    with co.should():
        co.answered(request, Code.INVALID_ARGUMENT)
    for _ in range(2):
        co.ask(undo.group_deletion(group))
    co.answered(_look(group), Code.NOT_FOUND)
    co.refused_without(undo.group_deletion(group), "group_snapshot_id")


def test_c346_group_snapshot_keeps_order_of_writes(co: Co) -> None:
    volumes = [co.volume() for _ in range(2)]
    targets = [co.use(volume) for volume in volumes]
    stop = threading.Event()
    started = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            for target in targets:
                co.host.write(target / "file", _COUNTER.pack(number))
            started.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert started.wait(co.options.timeout_s)
        groups = [
            copies.take_group(
                co, copies.group_request(co, [volume.volume_id for volume in volumes])
            )
            for _ in range(3)
        ]
    finally:
        stop.set()
        writer.join()
    for group in groups:
        members = {snapshot.source_volume_id: snapshot.snapshot_id for snapshot in group.snapshots}
        first, second = (_counter(co, members[volume.volume_id]) for volume in volumes)
        assert second <= first <= second + 1, (
            f"the first volume has write {first}, the second has {second}"
        )


def _group(co: Co, members: int) -> csi_pb2.VolumeGroupSnapshot:
    ids = [co.volume().volume_id for _ in range(members)]
    return copies.take_group(co, copies.group_request(co, ids))


def _look(group: csi_pb2.VolumeGroupSnapshot) -> csi_pb2.GetVolumeGroupSnapshotRequest:
    return csi_pb2.GetVolumeGroupSnapshotRequest(
        group_snapshot_id=group.group_snapshot_id,
        snapshot_ids=[member.snapshot_id for member in group.snapshots],
    )


def _counter(co: Co, snapshot_id: str) -> int:
    restored = co.volume(source=copies.of_snapshot(snapshot_id))
    data = co.host.read(co.use(restored) / "file", _COUNTER.size)
    return int(_COUNTER.unpack(data)[0])
