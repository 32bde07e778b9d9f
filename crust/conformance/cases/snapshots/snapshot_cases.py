"""Snapshots, restores and clones: what is refused, and what is listed (C-301 to C-323)."""

from crust.conformance.case import (
    CLONE,
    CREATE,
    GET_SNAPSHOT,
    LIST_SNAPSHOTS,
    SNAPSHOT,
    beyond,
    case,
    must,
)
from crust.conformance.orchestrator import copies
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2

_UNKNOWN = "conformance-no-such-thing"


@case(301, CREATE, SNAPSHOT)
@must("CreateSnapshot", "source_volume_id and name are REQUIRED (Error Scheme: INVALID_ARGUMENT)")
@beyond(
    "CreateSnapshot Errors",
    "the table has no row for a volume that does not exist; elsewhere that is NOT_FOUND",
)
def test_a_snapshot_needs_a_name_and_a_source(co: Co) -> None:
    """CreateSnapshot: INVALID_ARGUMENT without one of them; NOT_FOUND for no such volume."""
    volume = co.volume()
    call = co.controller.CreateSnapshot
    for field in ("source_volume_id", "name"):
        request = copies.snapshot_request(co, volume.volume_id)
        request.ClearField(field)
        co.refused(call, request, Code.INVALID_ARGUMENT)
    with co.beyond():
        co.refused(call, copies.snapshot_request(co, _UNKNOWN), Code.NOT_FOUND)


@case(302, CREATE, SNAPSHOT)
@must(
    "CreateSnapshot",
    "this operation MUST be idempotent; of another volume MUST be ALREADY_EXISTS; id, "
    "source and creation_time are REQUIRED",
)
def test_a_snapshot_is_made_once(co: Co) -> None:
    """CreateSnapshot: repeated, it returns the same snapshot, with id, source, time and size."""
    volume = co.volume()
    request = copies.snapshot_request(co, volume.volume_id)
    first, again = copies.take(co, request), copies.take(co, request)
    assert first.snapshot_id
    assert first.snapshot_id == again.snapshot_id
    assert first.creation_time == again.creation_time
    assert first.source_volume_id == volume.volume_id
    assert first.creation_time.seconds > 0
    assert first.size_bytes >= 0
    other = co.volume()
    request.source_volume_id = other.volume_id
    co.refused(co.controller.CreateSnapshot, request, Code.ALREADY_EXISTS)


@case(303, SNAPSHOT)
@must(
    "DeleteSnapshot",
    "idempotent: a snapshot that does not exist MUST be OK; snapshot_id is REQUIRED",
)
def test_snapshot_deletion_is_idempotent(co: Co) -> None:
    """DeleteSnapshot: OK for no such snapshot; INVALID_ARGUMENT without an id."""
    copies.delete(co, _UNKNOWN)
    request = csi_pb2.DeleteSnapshotRequest()
    co.refused(co.controller.DeleteSnapshot, request, Code.INVALID_ARGUMENT)


@case(304, CREATE, SNAPSHOT)
@must(
    "CreateSnapshot",
    "any Unicode string that conforms to the length limit (128 bytes) is allowed as a name",
)
@beyond(
    "CreateSnapshot",
    "a CO sends no banned characters and no longer names; that a plugin refuses them is practice",
)
def test_a_snapshot_may_have_any_name(co: Co) -> None:
    """Size Limits: snapshot names of any Unicode and of 128 bytes; INVALID_ARGUMENT above, and for control
    characters.
    """
    volume = co.volume()
    stem = co.name("")
    names = [f"{each}{stem}" for each in ("a/b", "..", "ü", "🦀")] + [stem.ljust(128, "x")]
    made = [
        copies.take(co, copies.snapshot_request(co, volume.volume_id, name=name)) for name in names
    ]
    assert len({each.snapshot_id for each in made}) == len(names)
    for bad in (stem.ljust(129, "x"), f"a\x07{stem}"):
        request = copies.snapshot_request(co, volume.volume_id, name=bad)
        code, message = co.outcome(co.controller.CreateSnapshot, request)
        if code is Code.OK:
            copies.begin(co, request)
        with co.beyond():
            assert code is Code.INVALID_ARGUMENT, f"{code.name}: {message}"


@case(308, CREATE, SNAPSHOT)
@must("CreateVolume Errors", "a source that does not exist MUST be NOT_FOUND")
def test_create_from_unknown_snapshot_is_not_found(co: Co) -> None:
    """CreateVolume: NOT_FOUND for no such snapshot."""
    request = co.create_request(source=copies.of_snapshot(_UNKNOWN))
    co.refused(co.controller.CreateVolume, request, Code.NOT_FOUND)


@case(310, CREATE, SNAPSHOT)
@must(
    "CreateVolume Errors",
    "a volume of this name that is incompatible with volume_content_source MUST be ALREADY_EXISTS",
)
def test_create_again_with_other_source_is_already_exists(co: Co) -> None:
    """CreateVolume: the same name without the snapshot, or with another, is ALREADY_EXISTS."""
    volume = co.volume()
    one, other = (copies.snapshot(co, volume.volume_id) for _ in range(2))
    request = co.create_request(source=copies.of_snapshot(one.snapshot_id))
    co.create(request)
    for source in (copies.of_snapshot(other.snapshot_id), None):
        again = co.create_request(name=request.name, source=source)
        co.refused(co.controller.CreateVolume, again, Code.ALREADY_EXISTS)


@case(312, CREATE, CLONE)
@must(
    "CreateVolume Errors",
    "a source that does not exist MUST be NOT_FOUND; a size that is not allowed MUST be "
    "OUT_OF_RANGE",
)
def test_a_clone_needs_its_source_and_its_size(co: Co) -> None:
    """CLONE_VOLUME: NOT_FOUND for no such volume; OUT_OF_RANGE for less than the source has."""
    volume = co.volume(size_bytes=2 * co.options.parameters.size_bytes)
    call = co.controller.CreateVolume
    co.refused(call, co.create_request(source=copies.of_volume(_UNKNOWN)), Code.NOT_FOUND)
    if not volume.capacity_bytes:  # unknown, so that nothing is smaller
        return
    smaller = co.create_request(source=copies.of_volume(volume.volume_id))
    smaller.capacity_range.limit_bytes = smaller.capacity_range.required_bytes
    co.refused(call, smaller, Code.OUT_OF_RANGE)


@case(321, CREATE, SNAPSHOT, LIST_SNAPSHOTS)
@must(
    "ListSnapshots",
    "SHALL return the information about all snapshots within the given parameters",
)
def test_snapshots_are_listed_by_source_and_by_id(co: Co) -> None:
    """ListSnapshots: all, of a volume, or one; a filter that matches nothing gives an empty list."""
    one, other = co.volume(), co.volume()
    made = [copies.snapshot(co, each.volume_id) for each in (one, one, other)]
    ids = [each.snapshot_id for each in made]
    request = csi_pb2.ListSnapshotsRequest
    assert set(ids) <= set(_listed(co, request()))
    assert set(_listed(co, request(source_volume_id=one.volume_id))) == set(ids[:2])
    assert _listed(co, request(snapshot_id=ids[2])) == [ids[2]]
    assert not _listed(co, request(snapshot_id=_UNKNOWN))
    assert not _listed(co, request(source_volume_id=_UNKNOWN))
    copies.delete(co, ids[0])
    assert not _listed(co, request(snapshot_id=ids[0]))


@case(322, CREATE, SNAPSHOT, LIST_SNAPSHOTS)
@must(
    "ListSnapshots",
    "MUST NOT return more entries than max_entries, and MUST set next_token if there are "
    "more; an invalid starting_token MUST be ABORTED",
)
@beyond(
    "ListSnapshots",
    "a CO MAY witness duplicates and miss snapshots while others change; a CO's max_entries "
    "MUST NOT be negative",
)
def test_snapshot_pages_list_each_once_while_others_change(co: Co) -> None:
    """ListSnapshots: at most max_entries a page; what exists throughout is listed once; odd tokens and
    sizes are refused.
    """
    volume = co.volume()
    made = [copies.snapshot(co, volume.volume_id).snapshot_id for _ in range(5)]
    request = csi_pb2.ListSnapshotsRequest(max_entries=2)
    call = co.controller.ListSnapshots
    seen: list[str] = []
    gone = ""
    while True:
        answer = co.ask(call, request)
        assert len(answer.entries) <= 2
        seen += [each.snapshot.snapshot_id for each in answer.entries]
        ours = [each for each in seen if each in made]
        if ours and not gone:
            gone = ours[-1]
            copies.delete(co, gone)
        if not answer.next_token:
            break
        request.starting_token = answer.next_token
    with co.beyond():
        assert len(seen) == len(set(seen)), "a snapshot is listed twice"
        assert set(made) - {gone} <= set(seen), "a snapshot that stayed was not listed"
        negative = csi_pb2.ListSnapshotsRequest(max_entries=-1)
        co.refused(call, negative, Code.INVALID_ARGUMENT)
    odd = csi_pb2.ListSnapshotsRequest(starting_token="conformance: no such token")
    co.refused(call, odd, Code.ABORTED)


@case(323, CREATE, SNAPSHOT, GET_SNAPSHOT)
@must(
    "GetSnapshot Errors",
    "a snapshot that does not exist MUST be NOT_FOUND; snapshot_id is REQUIRED",
)
def test_get_snapshot_returns_snapshot_as_created(co: Co) -> None:
    """GetSnapshot: as created; NOT_FOUND for no such snapshot, INVALID_ARGUMENT without an id."""
    volume = co.volume()
    made = copies.snapshot(co, volume.volume_id)
    request = csi_pb2.GetSnapshotRequest
    call = co.controller.GetSnapshot
    found = co.ask(call, request(snapshot_id=made.snapshot_id)).snapshot
    assert found.snapshot_id == made.snapshot_id
    assert found.source_volume_id == made.source_volume_id
    co.refused(call, request(snapshot_id=_UNKNOWN), Code.NOT_FOUND)
    co.refused(call, request(), Code.INVALID_ARGUMENT)


def _listed(co: Co, request: csi_pb2.ListSnapshotsRequest) -> list[str]:
    answer = co.ask(co.controller.ListSnapshots, request)
    return [each.snapshot.snapshot_id for each in answer.entries]
