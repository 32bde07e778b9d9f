"""Where volumes and snapshots can be used: topology (C-151 to C-158)."""

from collections.abc import Sequence

from crust.conformance import copies
from crust.conformance.case import CAPACITY, CREATE, LIST, NODE, SNAPSHOT, TOPOLOGY, case
from crust.conformance.co import Co, Code
from crust.wire.csi.v1 import csi_pb2

_SNAPSHOT_TOPOLOGY = "plugin.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS"
_NO_SUCH_PLACE = (Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT)


@case(151, CREATE, NODE, TOPOLOGY)
def test_a_volume_says_where_it_can_be_used(co: Co) -> None:
    """CreateVolume: accessible_topology has no key that NodeGetInfo has not, and is the same when asked again."""
    request = co.create_request()
    volume = co.create(request)
    _check_keys(co, volume.accessible_topology)
    assert co.create(request) == volume


@case(152, CREATE, NODE, TOPOLOGY)
def test_a_volume_is_where_it_is_required(co: Co) -> None:
    """CreateVolume: made for this node's topology, the volume can be used on this node."""
    request = co.create_request()
    _require(request.accessibility_requirements, [_here(co)])
    volume = co.create(request)
    _check_keys(co, volume.accessible_topology)
    assert _is_accessible(co, volume.accessible_topology)
    assert co.sight.mounts_at(co.use(volume)) == 1


@case(153, CREATE, NODE, TOPOLOGY)
def test_a_volume_that_cannot_be_where_it_must_is_not_made(co: Co) -> None:
    """CreateVolume: RESOURCE_EXHAUSTED (INVALID_ARGUMENT where the topology means nothing) for a place that
    is not there; nothing is made.
    """
    request = co.create_request()
    _require(request.accessibility_requirements, [_nowhere(co)])
    co.refused(co.controller.CreateVolume, request, *_NO_SUCH_PLACE)
    request.ClearField("accessibility_requirements")
    co.create(request)


@case(154, CREATE, NODE, TOPOLOGY)
def test_a_preference_is_among_what_is_required(co: Co) -> None:
    """CreateVolume: a preferred topology that is not requisite is INVALID_ARGUMENT, or the requisite one wins."""
    request = co.create_request()
    _require(request.accessibility_requirements, [_here(co)], [_nowhere(co)])
    code, _ = co.outcome(co.controller.CreateVolume, request)
    assert code in (Code.OK, Code.INVALID_ARGUMENT), code
    if code is Code.OK:
        assert _is_accessible(co, co.create(request).accessible_topology)


@case(155, CREATE, NODE, TOPOLOGY)
def test_one_of_the_required_places_is_enough(co: Co) -> None:
    """CreateVolume: where the first choice cannot be had, another requisite topology is taken."""
    request = co.create_request()
    places = [_nowhere(co), _here(co)]
    _require(request.accessibility_requirements, places, places)
    assert _is_accessible(co, co.create(request).accessible_topology)


@case(156, CREATE, NODE, TOPOLOGY)
def test_the_place_is_part_of_what_a_volume_is(co: Co) -> None:
    """CreateVolume: the same name where the volume is not is ALREADY_EXISTS."""
    request = co.create_request()
    _require(request.accessibility_requirements, [_here(co)])
    co.create(request)
    request.ClearField("accessibility_requirements")
    _require(request.accessibility_requirements, [_nowhere(co)])
    co.refused(co.controller.CreateVolume, request, Code.ALREADY_EXISTS)


@case(157, CREATE, NODE, TOPOLOGY, LIST)
def test_the_list_tells_the_same_place(co: Co) -> None:
    """ListVolumes: the accessible_topology that CreateVolume told."""
    volume = co.volume()
    answer = co.ask(co.controller.ListVolumes, csi_pb2.ListVolumesRequest())
    listed = [each.volume for each in answer.entries if each.volume.volume_id == volume.volume_id]
    assert [list(each.accessible_topology) for each in listed] == [list(volume.accessible_topology)]


@case(158, CREATE, SNAPSHOT, NODE, TOPOLOGY, _SNAPSHOT_TOPOLOGY)
def test_a_snapshot_says_where_it_can_be_used(co: Co) -> None:
    """CreateSnapshot: accessible_topology as required, of NodeGetInfo's keys; refused for a place that is
    not there.
    """
    volume = co.volume()
    request = copies.snapshot_request(co, volume.volume_id)
    _require(request.accessibility_requirements, [_nowhere(co)])
    co.refused(co.controller.CreateSnapshot, request, *_NO_SUCH_PLACE)
    request.ClearField("accessibility_requirements")
    _require(request.accessibility_requirements, [_here(co)])
    made = copies.take(co, request)
    _check_keys(co, made.accessible_topology)
    assert _is_accessible(co, made.accessible_topology)


@case(143, NODE, CAPACITY, TOPOLOGY)
def test_capacity_is_of_a_place(co: Co) -> None:
    """GetCapacity: there is room in this node's topology if there is any, and none in a place that is not
    there.
    """
    parameters = co.options.parameters.parameters
    request = csi_pb2.GetCapacityRequest(parameters=parameters)
    anywhere = co.ask(co.controller.GetCapacity, request).available_capacity
    request.accessible_topology.segments.update(_here(co))
    here = co.ask(co.controller.GetCapacity, request).available_capacity
    assert bool(anywhere) == bool(here)
    request.accessible_topology.segments.update(_nowhere(co))
    assert co.ask(co.controller.GetCapacity, request).available_capacity == 0


def _here(co: Co) -> dict[str, str]:
    info = co.ask(co.node.NodeGetInfo, csi_pb2.NodeGetInfoRequest())
    return dict(info.accessible_topology.segments)


def _nowhere(co: Co) -> dict[str, str]:
    return dict.fromkeys(_here(co), "crust-conformance-nowhere")


def _require(
    requirement: csi_pb2.TopologyRequirement,
    requisite: list[dict[str, str]],
    preferred: list[dict[str, str]] | None = None,
) -> None:
    """As external-provisioner does: what is preferred is, unless told, all of the requisite ones."""
    chosen = requisite if preferred is None else preferred
    requirement.requisite.extend(csi_pb2.Topology(segments=each) for each in requisite)
    requirement.preferred.extend(csi_pb2.Topology(segments=each) for each in chosen)


def _check_keys(co: Co, places: Sequence[csi_pb2.Topology]) -> None:
    known = set(_here(co))
    for each in places:
        assert set(each.segments) <= known, f"{set(each.segments) - known} is no key of the node's"


def _is_accessible(co: Co, places: Sequence[csi_pb2.Topology]) -> bool:
    """No topology at all is everywhere."""
    here = _here(co).items()
    return not places or any(dict(each.segments).items() <= here for each in places)
