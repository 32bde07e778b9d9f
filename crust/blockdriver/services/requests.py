"""The controller's requests, decoded; `responses` encodes what it answers."""

from crust.blockdriver.controller import io_limit_parameters, topology
from crust.blockdriver.controller.controller_publish import PublishRequest
from crust.blockdriver.controller.create_volume import Create
from crust.blockdriver.controller.get_capacity import CapacityQuery
from crust.blockdriver.controller.modify_volume import Change, Expansion
from crust.blockdriver.services.node_identity import NODE_ID_MAX_BYTES
from crust.blockdriver.snapshots import content_source
from crust.rpc.messages import csi, limits
from crust.wire.csi.v1 import csi_pb2


def create(request: csi_pb2.CreateVolumeRequest) -> Create:
    """CreateVolume."""
    name = limits.required(request.name, "name")
    capabilities = csi.capabilities(request.volume_capabilities)
    wanted = csi.capacity_range(request.capacity_range)
    sent = limits.mapping(request.parameters, "parameters")
    made_of = _source(request)
    mutable = limits.mapping(request.mutable_parameters, "mutable_parameters")
    first_limits = io_limit_parameters.parse(mutable)
    place = requirement(request.accessibility_requirements)
    return Create(
        name, wanted, capabilities, tuple(sorted(sent.items())), place, made_of, first_limits
    )


def publish(request: csi_pb2.ControllerPublishVolumeRequest) -> PublishRequest:
    """ControllerPublishVolume."""
    volume_id = limits.volume_id(request.volume_id)
    node_id = limits.required(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
    if not request.HasField("volume_capability"):
        raise limits.MissingField("volume_capability")
    capability = csi.capability(request.volume_capability)
    limits.mapping(request.volume_context, "volume_context")
    return PublishRequest(volume_id, node_id, capability, request.readonly)


def capacity_query(request: csi_pb2.GetCapacityRequest) -> CapacityQuery:
    """GetCapacity."""
    return CapacityQuery(
        tuple(csi.capability(each) for each in request.volume_capabilities),
        tuple(sorted(limits.mapping(request.parameters, "parameters").items())),
        _topology(request),
    )


def expansion(request: csi_pb2.ControllerExpandVolumeRequest) -> Change:
    """ControllerExpandVolume, without the volume's id."""
    if not request.HasField("capacity_range"):
        raise limits.MissingField("capacity_range")
    wanted = csi.capacity_range(request.capacity_range)
    given = request.HasField("volume_capability")
    capability = csi.capability(request.volume_capability) if given else None
    return Change(expansion=Expansion(wanted, capability))


def modification(request: csi_pb2.ControllerModifyVolumeRequest) -> Change:
    """ControllerModifyVolume, without the volume's id."""
    if not request.mutable_parameters:
        raise limits.MissingField("mutable_parameters")
    sent = limits.mapping(request.mutable_parameters, "mutable_parameters")
    return Change(limits=io_limit_parameters.parse(sent))


def requirement(pb: csi_pb2.TopologyRequirement) -> topology.Requirement:
    """Read CreateVolume's accessibility_requirements; raises `topology.InvalidTopology`."""
    return topology.requirement(
        tuple(_segments(each) for each in pb.requisite),
        tuple(_segments(each) for each in pb.preferred),
    )


def _topology(request: csi_pb2.GetCapacityRequest) -> topology.Segments:
    """The topology of a GetCapacity; empty for any. Raises `topology.InvalidTopology`."""
    if not request.HasField("accessible_topology") or not request.accessible_topology.segments:
        return ()
    return _segments(request.accessible_topology)


def _segments(pb: csi_pb2.Topology) -> topology.Segments:
    return topology.segments(limits.mapping(pb.segments, "segments"))


def _source(request: csi_pb2.CreateVolumeRequest) -> content_source.Wanted | None:
    """CreateVolume's volume_content_source. Raises `limits.MissingField`."""
    if not request.HasField("volume_content_source"):
        return None
    kind = request.volume_content_source.WhichOneof("type")
    if kind == "snapshot":
        snapshot_id = request.volume_content_source.snapshot.snapshot_id
        return content_source.Wanted("snapshot", limits.required(snapshot_id, "snapshot_id"))
    if kind == "volume":
        volume_id = request.volume_content_source.volume.volume_id
        return content_source.Wanted("volume", limits.required(volume_id, "volume_id"))
    raise limits.MissingField("volume_content_source.type")
