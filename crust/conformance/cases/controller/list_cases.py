"""ListVolumes, ControllerGetVolume, GetCapacity, volume health (C-131 to C-146)."""

from crust.conformance.case import (
    CAPACITY,
    CREATE,
    EPHEMERAL,
    GET,
    LIST,
    LIST_NODES,
    NODE,
    PUBLISH,
    beyond,
    case,
    must,
)
from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2

_HEALTH_GET = "controller.GET_VOLUME_HEALTH"
_HEALTH_LIST = "controller.LIST_VOLUME_HEALTH"
_COUNT = 7


@case(131, CREATE, LIST)
@must(
    "ListVolumes",
    "SHALL return the information about all the volumes; a volume SHALL always report the "
    "same volume_context",
)
def test_list_has_every_volume_as_created(co: Co) -> None:
    """ListVolumes: every volume, with the id, size and context that CreateVolume returned."""
    volumes = [co.volume() for _ in range(3)]
    listed = {each.volume.volume_id: each.volume for each in _all(co, 0)}
    for volume in volumes:
        assert volume.volume_id in listed
        found = listed[volume.volume_id]
        assert found.capacity_bytes in (0, volume.capacity_bytes)
        assert found.volume_context == volume.volume_context
    co.delete(volumes[0].volume_id)
    assert volumes[0].volume_id not in {each.volume.volume_id for each in _all(co, 0)}


@case(132, LIST)
@must("ListVolumes Errors", "an invalid starting_token MUST be ABORTED")
@beyond(
    "ListVolumes",
    "a CO's max_entries MUST NOT be negative; that a plugin refuses it is practice",
)
def test_a_list_is_not_asked_for_in_odd_ways(co: Co) -> None:
    """ListVolumes: a negative max_entries is INVALID_ARGUMENT, an unknown starting_token is ABORTED."""
    negative = csi_pb2.ListVolumesRequest(max_entries=-1)
    with co.beyond():
        co.refused(co.controller.ListVolumes, negative, Code.INVALID_ARGUMENT)
    odd = csi_pb2.ListVolumesRequest(starting_token="conformance: no such token")
    co.refused(co.controller.ListVolumes, odd, Code.ABORTED)


@case(133, CREATE, LIST)
@must(
    "ListVolumes",
    "MUST NOT return more entries than max_entries, and MUST set next_token if there are more",
)
def test_a_list_comes_in_pages(co: Co) -> None:
    """ListVolumes: at most max_entries a page, every volume on one page only."""
    made = {co.volume().volume_id for _ in range(_COUNT)}
    listed = [each.volume.volume_id for each in _all(co, 2)]
    assert len(listed) == len(set(listed)), "a volume is listed twice"
    assert made <= set(listed)


@case(134, CREATE, LIST)
@beyond(
    "ListVolumes",
    "a CO MAY witness duplicates and miss volumes while others are created and deleted; "
    "good plugins avoid it",
)
def test_pages_list_each_volume_once_while_others_change(co: Co) -> None:
    """ListVolumes: what exists from the first page to the last is listed once, also when other volumes are created
    and deleted meanwhile.
    """
    volumes = [co.volume().volume_id for _ in range(_COUNT)]
    seen: list[str] = []
    gone: set[str] = set()
    token = ""
    while True:
        entries, token = _page(co, 2, token)
        seen += [each.volume.volume_id for each in entries]
        if not token:
            break
        ours = [each for each in seen if each in volumes and each not in gone]
        if ours and len(gone) < 3:
            gone.add(ours[-1])  # the one that a token may point at
            co.delete(ours[-1])
            co.volume()
    assert len(seen) == len(set(seen)), "a volume is listed twice"
    assert set(volumes) - gone <= set(seen), "a volume that stayed was not listed"


@case(135, CREATE, LIST, LIST_NODES, PUBLISH, NODE)
@must(
    "ListVolumes",
    "published_node_ids is a list of all nodes that the volume is controller published on",
)
@beyond(
    "ListVolumes",
    "published_node_ids MAY include nodes that the volume is not published to; "
    "external-attacher acts on it",
)
def test_list_has_published_node_ids(co: Co) -> None:
    """ListVolumes: published_node_ids is what is attached now, no more and no less."""
    volume = co.volume()
    with co.beyond():
        assert _nodes(co, volume.volume_id) == []
    co.attach(volume)
    listed = _nodes(co, volume.volume_id)
    assert co.node_id() in listed
    co.detach(volume.volume_id)
    with co.beyond():
        assert listed == [co.node_id()]
        assert _nodes(co, volume.volume_id) == []


@case(136, CREATE, GET)
@must(
    "ControllerGetVolume Errors",
    "a volume that does not exist MUST be NOT_FOUND; volume_id is REQUIRED",
)
def test_get_volume_returns_volume_as_created(co: Co) -> None:
    """ControllerGetVolume: as created; NOT_FOUND for no such volume, INVALID_ARGUMENT without an id."""
    volume = co.volume()
    request = csi_pb2.ControllerGetVolumeRequest
    call = co.controller.ControllerGetVolume
    answer = co.ask(call, request(volume_id=volume.volume_id))
    assert answer.volume.volume_id == volume.volume_id
    assert answer.volume.capacity_bytes in (0, volume.capacity_bytes)
    co.refused(call, request(volume_id=UNKNOWN_VOLUME), Code.NOT_FOUND)
    co.refused(call, request(), Code.INVALID_ARGUMENT)


@case(137, NODE, LIST, EPHEMERAL)
@beyond("Kubernetes", "inline ephemeral volumes belong to their pod, and CSI does not know them")
def test_lists_leave_out_ephemeral_volumes(co: Co) -> None:
    """Inline ephemeral volumes: their id is the pod's, so ListVolumes and ControllerListVolumeHealth have none
    of them.
    """
    before = _ids(co)
    target = co.target()
    volume_id = "csi-" + co.name("").encode().hex().ljust(64, "0")[:64]
    co.ask(co.node.NodePublishVolume, co.ephemeral_request(volume_id, target))
    assert _ids(co) <= before, "an ephemeral volume is listed"


@case(141, CAPACITY)
@must("GetCapacity", "available_capacity MUST NOT be negative")
@beyond("GetCapacity", "maximum_volume_size is the largest size, minimum_volume_size the smallest")
def test_capacity_is_not_negative(co: Co) -> None:
    """GetCapacity: not negative; the largest volume is no smaller than the smallest."""
    answer = co.ask(
        co.controller.GetCapacity,
        csi_pb2.GetCapacityRequest(parameters=co.options.parameters.parameters),
    )
    assert answer.available_capacity >= 0
    if answer.HasField("maximum_volume_size") and answer.HasField("minimum_volume_size"):
        with co.beyond():
            assert answer.minimum_volume_size.value <= answer.maximum_volume_size.value


@case(142, CREATE, CAPACITY)
@must(
    "CreateVolume Errors",
    "a capacity_range that is not allowed MUST be OUT_OF_RANGE, out of capacity RESOURCE_EXHAUSTED",
)
@beyond(
    "GetCapacity",
    "maximum_volume_size is the largest size that may be used; available_capacity is no promise",
)
def test_a_volume_above_the_maximum_is_refused(co: Co) -> None:
    """GetCapacity: a volume larger than maximum_volume_size, or than all that is available, is not created; a
    refusal is OUT_OF_RANGE or RESOURCE_EXHAUSTED.
    """
    answer = co.ask(
        co.controller.GetCapacity,
        csi_pb2.GetCapacityRequest(parameters=co.options.parameters.parameters),
    )
    largest = answer.maximum_volume_size.value or answer.available_capacity
    above = co.create_request(size_bytes=2 * largest + co.options.parameters.size_bytes)
    code, message = co.outcome(co.controller.CreateVolume, above)
    with co.beyond():
        assert code is not Code.OK, "a volume larger than the capacity was created"
    assert code in (Code.OK, Code.OUT_OF_RANGE, Code.RESOURCE_EXHAUSTED), f"{code.name}: {message}"


@case(145, CREATE, _HEALTH_GET)
@must(
    "ControllerGetVolumeHealth (CSI 1.13)",
    "a volume that does not exist is NOT_FOUND; volume_id is REQUIRED",
)
@beyond("ControllerGetVolumeHealth (CSI 1.13)", "a new volume has nothing wrong")
def test_get_volume_health_of_new_volume_is_healthy(co: Co) -> None:
    """ControllerGetVolumeHealth: nothing wrong with a new volume; NOT_FOUND, INVALID_ARGUMENT as elsewhere."""
    volume = co.volume()
    request = csi_pb2.ControllerGetVolumeHealthRequest
    call = co.controller.ControllerGetVolumeHealth
    health = co.ask(call, request(volume_id=volume.volume_id)).volume_health
    assert health.volume_id == volume.volume_id
    with co.beyond():
        assert not list(health.health_statuses)
    co.refused(call, request(volume_id=UNKNOWN_VOLUME), Code.NOT_FOUND)
    co.refused(call, request(), Code.INVALID_ARGUMENT)


@case(146, CREATE, _HEALTH_LIST)
@must("ControllerListVolumeHealth (CSI 1.13)", "an invalid starting_token is ABORTED")
@beyond(
    "ControllerListVolumeHealth (CSI 1.13)",
    "a new volume has nothing wrong; a negative max_entries is refused",
)
def test_list_volume_health_leaves_out_new_volume(co: Co) -> None:
    """ControllerListVolumeHealth: a new volume is not listed as unhealthy; tokens and sizes as in ListVolumes."""
    volume = co.volume()
    request = csi_pb2.ControllerListVolumeHealthRequest
    call = co.controller.ControllerListVolumeHealth
    unhealthy = [each.volume_id for each in co.ask(call, request()).entries if each.health_statuses]
    with co.beyond():
        assert volume.volume_id not in unhealthy
        co.refused(call, request(max_entries=-1), Code.INVALID_ARGUMENT)
    co.refused(call, request(starting_token="conformance: no such token"), Code.ABORTED)


def _page(
    co: Co, max_entries: int, token: str
) -> tuple[list[csi_pb2.ListVolumesResponse.Entry], str]:
    request = csi_pb2.ListVolumesRequest(max_entries=max_entries, starting_token=token)
    answer = co.ask(co.controller.ListVolumes, request)
    assert not max_entries or len(answer.entries) <= max_entries
    return list(answer.entries), answer.next_token


def _all(co: Co, max_entries: int) -> list[csi_pb2.ListVolumesResponse.Entry]:
    entries, token = _page(co, max_entries, "")
    while token:
        more, token = _page(co, max_entries, token)
        entries += more
    return entries


def _ids(co: Co) -> set[str]:
    """The ids in all lists of volumes. Others may delete volumes meanwhile, and create none."""
    found = {each.volume.volume_id for each in _all(co, 0)}
    if _HEALTH_LIST in co.has:
        request = csi_pb2.ControllerListVolumeHealthRequest()
        answer = co.ask(co.controller.ControllerListVolumeHealth, request)
        found |= {each.volume_id for each in answer.entries}
    return found


def _nodes(co: Co, volume_id: str) -> list[str]:
    found = [each for each in _all(co, 0) if each.volume.volume_id == volume_id]
    assert found, "the volume is not listed"
    return list(found[0].status.published_node_ids)
