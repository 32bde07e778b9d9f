"""Where volumes and snapshots can be used: topology (C-151 to C-158)."""

from collections.abc import Sequence

from crust.conformance.case import (
    CAPACITY,
    CREATE,
    LIST,
    NODE,
    SNAPSHOT,
    TOPOLOGY,
    beyond,
    case,
    must,
    should,
)
from crust.conformance.orchestrator import copies
from crust.conformance.orchestrator.calls import Code, Refusal
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2

_SNAPSHOT_TOPOLOGY = "plugin.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS"
_UNREACHABLE = (Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT)


@case(151, CREATE, NODE, TOPOLOGY)
@beyond(
    "Volume",
    "accessible_topology tells where the volume is; a CO compares its keys with those of "
    "NodeGetInfo",
)
def test_create_returns_topology_with_keys_of_node(co: Co) -> None:
    """CreateVolume: accessible_topology has only keys of NodeGetInfo, and is the same when the call is repeated."""
    request = co.create_request()
    volume = co.create(request)
    _check_keys(co, volume.accessible_topology)
    again = co.create(request)
    assert list(again.accessible_topology) == list(volume.accessible_topology)


@case(152, CREATE, NODE, TOPOLOGY)
@must(
    "TopologyRequirement",
    "the volume MUST be accessible from at least one of the requisite topologies",
)
def test_create_for_topology_of_node_is_usable_there(co: Co) -> None:
    """CreateVolume: a volume created for this node's topology can be used on this node."""
    request = co.create_request()
    _require(request.accessibility_requirements, [_node_topology(co)])
    volume = co.create(request)
    assert _is_accessible(co, volume.accessible_topology)
    assert co.host.mounts_at(co.use(volume)), "nothing is mounted at the target"


@case(153, CREATE, NODE, TOPOLOGY)
@must(
    "TopologyRequirement",
    "if the SP is unable to make it available from any requisite topology it MUST fail the call",
)
def test_create_for_unknown_topology_is_refused(co: Co) -> None:
    """CreateVolume: RESOURCE_EXHAUSTED (INVALID_ARGUMENT where the topology means nothing) for a topology
    that does not exist; nothing is created.
    """
    request = co.create_request()
    _require(request.accessibility_requirements, [_unknown_topology(co)])
    co.refused(co.controller.CreateVolume, request, *_UNREACHABLE)
    request.ClearField("accessibility_requirements")
    co.create(request)


@case(154, CREATE, NODE, TOPOLOGY)
@must(
    "TopologyRequirement",
    "the volume MUST be accessible from at least one of the requisite topologies",
)
def test_preferred_topology_outside_requisite_is_refused_or_ignored(co: Co) -> None:
    """CreateVolume: a preferred topology that is not requisite is INVALID_ARGUMENT, or the requisite one wins."""
    request = co.create_request()
    _require(request.accessibility_requirements, [_node_topology(co)], [_unknown_topology(co)])
    reply = co.reply(co.controller.CreateVolume, request)
    if isinstance(reply, Refusal):
        assert reply.code is Code.INVALID_ARGUMENT, str(reply)
    else:
        assert _is_accessible(co, reply.volume.accessible_topology)


@case(155, CREATE, NODE, TOPOLOGY)
@should(
    "TopologyRequirement",
    "the SP SHOULD first attempt the preferred topology and fall back to another requisite one",
)
def test_create_uses_any_requisite_topology(co: Co) -> None:
    """CreateVolume: if the preferred topology is not available, another requisite topology is used."""
    request = co.create_request()
    topologies = [_unknown_topology(co), _node_topology(co)]
    _require(request.accessibility_requirements, topologies, topologies)
    assert _is_accessible(co, co.create(request).accessible_topology)


@case(156, CREATE, NODE, TOPOLOGY)
@must(
    "CreateVolume Errors",
    "a volume of this name that is incompatible with accessibility_requirements MUST be "
    "ALREADY_EXISTS",
)
def test_create_again_with_other_topology_is_already_exists(co: Co) -> None:
    """CreateVolume: the same name with a topology that does not exist is ALREADY_EXISTS, or refused as for a new
    name.
    """
    request = co.create_request()
    _require(request.accessibility_requirements, [_node_topology(co)])
    co.create(request)
    request.ClearField("accessibility_requirements")
    _require(request.accessibility_requirements, [_unknown_topology(co)])
    co.refused(co.controller.CreateVolume, request, Code.ALREADY_EXISTS, *_UNREACHABLE)


@case(157, CREATE, NODE, TOPOLOGY, LIST)
@beyond(
    "Volume",
    "accessible_topology is OPTIONAL in a list; a CO that rebuilds its state reads it there",
)
def test_list_has_topology_of_create(co: Co) -> None:
    """ListVolumes: the accessible_topology that CreateVolume returned."""
    volume = co.volume()
    answer = co.ask(co.controller.ListVolumes, csi_pb2.ListVolumesRequest())
    listed = [each.volume for each in answer.entries if each.volume.volume_id == volume.volume_id]
    assert [list(each.accessible_topology) for each in listed] == [list(volume.accessible_topology)]


@case(158, CREATE, SNAPSHOT, NODE, TOPOLOGY, _SNAPSHOT_TOPOLOGY)
@beyond(
    "CreateSnapshot (CSI 1.13)",
    "accessibility_requirements are kept as CreateVolume keeps them",
)
def test_snapshot_has_required_topology(co: Co) -> None:
    """CreateSnapshot: accessible_topology as required, with NodeGetInfo's keys; refused for a topology that
    does not exist.
    """
    volume = co.volume()
    request = copies.snapshot_request(co, volume.volume_id)
    _require(request.accessibility_requirements, [_unknown_topology(co)])
    co.refused(co.controller.CreateSnapshot, request, *_UNREACHABLE)
    request.ClearField("accessibility_requirements")
    _require(request.accessibility_requirements, [_node_topology(co)])
    made = copies.take(co, request)
    _check_keys(co, made.accessible_topology)
    assert _is_accessible(co, made.accessible_topology)


@case(143, NODE, CAPACITY, TOPOLOGY)
@beyond(
    "GetCapacity",
    "SHALL report the capacity of accessible_topology; a CO sends only topologies that the "
    "SP supports",
)
def test_capacity_follows_topology(co: Co) -> None:
    """GetCapacity: this node's topology has capacity if there is any, and a topology that does not exist
    has none.
    """
    parameters = co.options.parameters.parameters
    request = csi_pb2.GetCapacityRequest(parameters=parameters)
    anywhere = co.ask(co.controller.GetCapacity, request).available_capacity
    request.accessible_topology.segments.update(_node_topology(co))
    here = co.ask(co.controller.GetCapacity, request).available_capacity
    assert bool(anywhere) == bool(here)
    request.accessible_topology.segments.update(_unknown_topology(co))
    assert co.ask(co.controller.GetCapacity, request).available_capacity == 0


def _node_topology(co: Co) -> dict[str, str]:
    info = co.ask(co.node.NodeGetInfo, csi_pb2.NodeGetInfoRequest())
    return dict(info.accessible_topology.segments)


def _unknown_topology(co: Co) -> dict[str, str]:
    return dict.fromkeys(_node_topology(co), "crust-conformance-nowhere")


def _require(
    requirement: csi_pb2.TopologyRequirement,
    requisite: list[dict[str, str]],
    preferred: list[dict[str, str]] | None = None,
) -> None:
    """As external-provisioner does: unless given, the preferred topologies are all requisite ones."""
    chosen = requisite if preferred is None else preferred
    requirement.requisite.extend(csi_pb2.Topology(segments=each) for each in requisite)
    requirement.preferred.extend(csi_pb2.Topology(segments=each) for each in chosen)


def _check_keys(co: Co, topologies: Sequence[csi_pb2.Topology]) -> None:
    known = set(_node_topology(co))
    for each in topologies:
        assert set(each.segments) <= known, f"{set(each.segments) - known} is not a key of the node"


def _is_accessible(co: Co, topologies: Sequence[csi_pb2.Topology]) -> bool:
    """A volume without topology is accessible everywhere."""
    here = _node_topology(co).items()
    return not topologies or any(dict(each.segments).items() <= here for each in topologies)
