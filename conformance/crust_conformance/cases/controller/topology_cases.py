"""The topology of volumes and snapshots (C-143, C-151 to C-158)."""

from collections.abc import Sequence

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator import copies
from crust_conformance.orchestrator.calls import Code, Refusal, check_code
from crust_conformance.orchestrator.co import Co

_UNREACHABLE = (Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT)


def test_c151_create_returns_topology_with_keys_of_node(co: Co) -> None:
    request = co.create_request()
    volume = co.create(request)
    _check_keys(co, volume.accessible_topology)
    second = co.create(request)
    assert list(second.accessible_topology) == list(volume.accessible_topology)


def test_c152_create_for_topology_of_node_is_usable_there(co: Co) -> None:
    volume = co.create(_create_request(co, [_node_topology(co)]))
    assert _is_accessible(co, volume.accessible_topology)
    assert co.host.mounts_at(co.use(volume)), "nothing is mounted at the target"


def test_c153_create_for_unknown_topology_is_refused(co: Co) -> None:
    request = _create_request(co, [_unknown_topology(co)])
    co.answered(request, *_UNREACHABLE)
    request.ClearField("accessibility_requirements")
    co.create(request)


def test_c154_preferred_topology_outside_requisite_is_refused_or_ignored(co: Co) -> None:
    request = _create_request(co, [_node_topology(co)], [_unknown_topology(co)])
    reply = co.reply(request)
    if isinstance(reply, Refusal):
        check_code(request, reply.code, Code.OK, Code.INVALID_ARGUMENT)
    else:
        assert _is_accessible(co, reply.volume.accessible_topology)


def test_c155_create_uses_any_requisite_topology(co: Co) -> None:
    request = _create_request(co, [_unknown_topology(co), _node_topology(co)])
    assert _is_accessible(co, co.create(request).accessible_topology)


def test_c156_create_again_with_other_topology_is_already_exists(co: Co) -> None:
    request = _create_request(co, [_node_topology(co)])
    co.create(request)
    request.ClearField("accessibility_requirements")
    _require(request.accessibility_requirements, [_unknown_topology(co)])
    co.answered(request, Code.ALREADY_EXISTS, *_UNREACHABLE)


def test_c157_list_has_topology_of_create(co: Co) -> None:
    volume = co.volume()
    listed = [entry.volume for entry in co.ask(csi_pb2.ListVolumesRequest()).entries]
    topologies = [row.accessible_topology for row in listed if row.volume_id == volume.volume_id]
    assert topologies == [volume.accessible_topology]


def test_c158_snapshot_has_required_topology(co: Co) -> None:
    volume = co.volume()
    request = copies.snapshot_request(co, volume.volume_id)
    _require(request.accessibility_requirements, [_unknown_topology(co)])
    co.answered(request, *_UNREACHABLE)
    request.ClearField("accessibility_requirements")
    _require(request.accessibility_requirements, [_node_topology(co)])
    snapshot = copies.take(co, request)
    _check_keys(co, snapshot.accessible_topology)
    assert _is_accessible(co, snapshot.accessible_topology)


def test_c143_capacity_follows_topology(co: Co) -> None:
    request = csi_pb2.GetCapacityRequest(parameters=co.options.parameters.parameters)
    anywhere = co.ask(request).available_capacity
    request.accessible_topology.segments.update(_node_topology(co))
    local = co.ask(request).available_capacity
    assert bool(anywhere) == bool(local)
    request.accessible_topology.segments.update(_unknown_topology(co))
    assert co.ask(request).available_capacity == 0


def _node_topology(co: Co) -> dict[str, str]:
    return dict(co.node_info().accessible_topology.segments)


def _unknown_topology(co: Co) -> dict[str, str]:
    return dict.fromkeys(_node_topology(co), "crust-conformance-nowhere")


def _create_request(
    co: Co, requisite: list[dict[str, str]], preferred: list[dict[str, str]] | None = None
) -> csi_pb2.CreateVolumeRequest:
    request = co.create_request()
    _require(request.accessibility_requirements, requisite, preferred)
    return request


def _require(
    requirement: csi_pb2.TopologyRequirement,
    requisite: list[dict[str, str]],
    preferred: list[dict[str, str]] | None = None,
) -> None:
    """Set the topologies as external-provisioner does: by default all requisite ones are preferred."""
    chosen = requisite if preferred is None else preferred
    requirement.requisite.extend(csi_pb2.Topology(segments=segments) for segments in requisite)
    requirement.preferred.extend(csi_pb2.Topology(segments=segments) for segments in chosen)


def _check_keys(co: Co, topologies: Sequence[csi_pb2.Topology]) -> None:
    keys = set(_node_topology(co))
    for topology in topologies:
        assert set(topology.segments) <= keys, (
            f"{set(topology.segments) - keys} is not a key of the node"
        )


def _is_accessible(co: Co, topologies: Sequence[csi_pb2.Topology]) -> bool:
    """A volume without topology is accessible everywhere."""
    node = _node_topology(co).items()
    return not topologies or any(dict(topology.segments).items() <= node for topology in topologies)
