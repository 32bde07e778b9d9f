"""Snapshots, restores and clones: refusals and lists (C-301 to C-323)."""

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator import copies
from crust_conformance.orchestrator.calls import UNKNOWN, Code
from crust_conformance.orchestrator.capabilities import SNAPSHOT_CONSTRAINTS
from crust_conformance.orchestrator.co import Co


def test_c301_a_snapshot_needs_a_name_and_a_source(co: Co) -> None:
    request = copies.snapshot_request(co, co.volume().volume_id)
    co.refused_without(request, "source_volume_id", "name")
    with co.beyond():
        co.refused_with_unknown(request, "source_volume_id")


def test_c302_a_snapshot_is_made_once(co: Co) -> None:
    volume = co.volume()
    request = copies.snapshot_request(co, volume.volume_id)
    first, second = copies.take(co, request), copies.take(co, request)
    assert first.snapshot_id
    assert first.snapshot_id == second.snapshot_id
    assert first.creation_time == second.creation_time
    assert first.source_volume_id == volume.volume_id
    assert first.creation_time.seconds > 0
    assert first.size_bytes >= 0
    has_place = bool(first.accessible_topology)
    assert not has_place or SNAPSHOT_CONSTRAINTS in co.has, (
        f"a snapshot has a topology without {SNAPSHOT_CONSTRAINTS}"
    )
    other_volume = co.volume()
    request.source_volume_id = other_volume.volume_id
    co.answered(request, Code.ALREADY_EXISTS)


def test_c303_snapshot_deletion_is_idempotent(co: Co) -> None:
    copies.delete(co, UNKNOWN)
    co.refused_without(csi_pb2.DeleteSnapshotRequest(snapshot_id=UNKNOWN), "snapshot_id")


def test_c304_a_snapshot_may_have_any_name(co: Co) -> None:
    volume = co.volume()
    stem = co.name("")
    names = [f"{prefix}{stem}" for prefix in ("a/b", "..", "ü", "🦀")] + [stem.ljust(128, "x")]
    snapshots = [
        copies.take(co, copies.snapshot_request(co, volume.volume_id, name=name)) for name in names
    ]
    assert len({snapshot.snapshot_id for snapshot in snapshots}) == len(names)
    for bad in (stem.ljust(129, "x"), f"a\x07{stem}"):
        request = copies.snapshot_request(co, volume.volume_id, name=bad)
        code, _ = co.outcome(request)
        if code is Code.OK:
            co.until_final(request)
        with co.beyond():
            assert code is Code.INVALID_ARGUMENT, (
                f"CreateSnapshotRequest was answered {code.name}, must be INVALID_ARGUMENT"
            )


def test_c308_create_from_unknown_snapshot_is_not_found(co: Co) -> None:
    request = co.create_request(source=copies.of_snapshot(UNKNOWN))
    co.answered(request, Code.NOT_FOUND)


def test_c310_create_again_with_other_source_is_already_exists(co: Co) -> None:
    volume = co.volume()
    first, second = (copies.snapshot(co, volume.volume_id) for _ in range(2))
    sources = (copies.of_snapshot(snapshot.snapshot_id) for snapshot in (first, second))
    _check_keeps_source(co, *sources)


def test_c317_create_again_with_other_source_volume_is_already_exists(co: Co) -> None:
    _check_keeps_source(co, *(copies.of_volume(co.volume().volume_id) for _ in range(2)))


def _check_keeps_source(
    co: Co, one: csi_pb2.VolumeContentSource, other: csi_pb2.VolumeContentSource
) -> None:
    """A name is of a volume with its source: with another, without it, and with one where it has none, is refused."""
    for made, repeated in ((one, (other, None)), (None, (one,))):
        request = co.create_request(source=made)
        co.create(request)
        for source in repeated:
            again = co.create_request(name=request.name, source=source)
            co.answered(again, Code.ALREADY_EXISTS)


def test_c312_a_clone_needs_its_source_and_its_size(co: Co) -> None:
    volume = co.volume(size_bytes=2 * co.options.parameters.size_bytes)
    co.answered(co.create_request(source=copies.of_volume(UNKNOWN)), Code.NOT_FOUND)
    if not volume.capacity_bytes:  # an unknown size has no smaller one
        return
    smaller = co.create_request(source=copies.of_volume(volume.volume_id))
    smaller.capacity_range.limit_bytes = smaller.capacity_range.required_bytes
    co.answered(smaller, Code.OUT_OF_RANGE)


def test_c321_snapshots_are_listed_by_source_and_by_id(co: Co) -> None:
    first, second = co.volume(), co.volume()
    snapshots = [copies.snapshot(co, volume.volume_id) for volume in (first, first, second)]
    ids = [snapshot.snapshot_id for snapshot in snapshots]
    request = csi_pb2.ListSnapshotsRequest
    assert set(ids) <= set(_listed(co, request()))
    assert set(_listed(co, request(source_volume_id=first.volume_id))) == set(ids[:2])
    assert _listed(co, request(snapshot_id=ids[2])) == [ids[2]]
    assert not _listed(co, request(snapshot_id=UNKNOWN))
    assert not _listed(co, request(source_volume_id=UNKNOWN))
    copies.delete(co, ids[0])
    assert not _listed(co, request(snapshot_id=ids[0]))


def test_c322_snapshot_pages_list_each_once_while_others_change(co: Co) -> None:
    volume = co.volume()
    ids = [copies.snapshot(co, volume.volume_id).snapshot_id for _ in range(5)]
    request = csi_pb2.ListSnapshotsRequest(max_entries=2)
    listed: list[str] = []
    deleted = ""
    while True:
        answer = co.ask(request)
        assert len(answer.entries) <= 2
        listed += [entry.snapshot.snapshot_id for entry in answer.entries]
        ours = [snapshot_id for snapshot_id in listed if snapshot_id in ids]
        if ours and not deleted:
            deleted = ours[-1]
            copies.delete(co, deleted)
        if not answer.next_token:
            break
        request.starting_token = answer.next_token
    with co.beyond():
        assert len(listed) == len(set(listed)), "a snapshot is listed twice"
        assert set(ids) - {deleted} <= set(listed), "a snapshot that stayed was not listed"
        negative = csi_pb2.ListSnapshotsRequest(max_entries=-1)
        co.answered(negative, Code.INVALID_ARGUMENT)
    odd = csi_pb2.ListSnapshotsRequest(starting_token="conformance: no such token")
    co.answered(odd, Code.ABORTED)


def test_c323_get_snapshot_returns_snapshot_as_created(co: Co) -> None:
    volume = co.volume()
    snapshot = copies.snapshot(co, volume.volume_id)
    request = csi_pb2.GetSnapshotRequest(snapshot_id=snapshot.snapshot_id)
    answer = co.ask(request).snapshot
    assert answer.snapshot_id == snapshot.snapshot_id
    assert answer.source_volume_id == snapshot.source_volume_id
    co.refused_with_unknown(request, "snapshot_id")
    co.refused_without(request, "snapshot_id")


def _listed(co: Co, request: csi_pb2.ListSnapshotsRequest) -> list[str]:
    answer = co.ask(request)
    return [entry.snapshot.snapshot_id for entry in answer.entries]
