"""The requests of the Controller and the Node service, decoded, and what they answer, encoded.

Differences between CSI 1.12 and 1.13 are here, by profile.
"""

from collections.abc import Mapping
from typing import TypeVar

from crust.blockdriver.controller import class_parameters, topology
from crust.blockdriver.controller.controller_publish import PublishRequest
from crust.blockdriver.controller.create_volume import CapacityQuery, Create
from crust.blockdriver.controller.list_volumes import Listed
from crust.blockdriver.engines.node_access import Access
from crust.blockdriver.node.node_stage import Stage
from crust.blockdriver.node.publish.publish_rules import Publish
from crust.blockdriver.records.health import Health, PoolFinding
from crust.blockdriver.records.models import VolumeRecord
from crust.blockdriver.services.roles import NODE_ID_MAX_BYTES, Role
from crust.blockdriver.snapshots import content_source
from crust.core import deferral_keys, volumes
from crust.rpc.messages import csi, requests
from crust.wire.csi.v1 import csi_pb2


def create(request: csi_pb2.CreateVolumeRequest) -> Create:
    """CreateVolume."""
    name = requests.required(request.name, "name")
    capabilities = csi.capabilities(request.volume_capabilities)
    wanted = csi.capacity_range(request.capacity_range)
    sent = requests.mapping(request.parameters, "parameters")
    made_of = (
        _source(request.volume_content_source)
        if request.HasField("volume_content_source")
        else None
    )
    mutable = requests.mapping(request.mutable_parameters, "mutable_parameters")
    first_limits = class_parameters.parse_mutable(mutable)
    place = topology.ANYWHERE
    if request.HasField("accessibility_requirements"):
        place = requirement(request.accessibility_requirements)
    return Create(
        name, wanted, capabilities, tuple(sorted(sent.items())), place, made_of, first_limits
    )


def controller_publish(request: csi_pb2.ControllerPublishVolumeRequest) -> PublishRequest:
    """ControllerPublishVolume."""
    volume_id = requests.volume_id(request.volume_id)
    node_id = requests.required(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
    if not request.HasField("volume_capability"):
        raise requests.MissingField("volume_capability")
    capability = csi.capability(request.volume_capability)
    requests.mapping(request.volume_context, "volume_context")
    return PublishRequest(volume_id, node_id, capability, request.readonly)


def capacity_query(request: csi_pb2.GetCapacityRequest) -> CapacityQuery:
    """GetCapacity."""
    return CapacityQuery(
        tuple(csi.capability(capability) for capability in request.volume_capabilities),
        tuple(sorted(requests.mapping(request.parameters, "parameters").items())),
        _topology(request),
    )


def expansion(
    request: csi_pb2.ControllerExpandVolumeRequest,
) -> tuple[volumes.CapacityRange, volumes.VolumeCapability | None]:
    """ControllerExpandVolume's size, and the capability that it is for."""
    if not request.HasField("capacity_range"):
        raise requests.MissingField("capacity_range")
    wanted = csi.capacity_range(request.capacity_range)
    given = request.HasField("volume_capability")
    capability = csi.capability(request.volume_capability) if given else None
    return wanted, capability


def modification(request: csi_pb2.ControllerModifyVolumeRequest) -> class_parameters.Changes:
    """ControllerModifyVolume, without the volume's id."""
    if not request.mutable_parameters:
        raise requests.MissingField("mutable_parameters")
    sent = requests.mapping(request.mutable_parameters, "mutable_parameters")
    return class_parameters.parse_mutable(sent)


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
    return topology.segments(requests.mapping(pb.segments, "segments"))


def _source(pb: csi_pb2.VolumeContentSource) -> content_source.Wanted:
    """CreateVolume's volume_content_source. Raises `requests.MissingField`."""
    kind = pb.WhichOneof("type")
    if kind == "snapshot":
        snapshot_id = requests.required(pb.snapshot.snapshot_id, "snapshot_id")
        return content_source.Wanted("snapshot", snapshot_id)
    if kind == "volume":
        return content_source.Wanted("volume", requests.required(pb.volume.volume_id, "volume_id"))
    raise requests.MissingField("volume_content_source.type")


_KEPT = (deferral_keys.PASSPHRASE, deferral_keys.USER_ID, deferral_keys.USER_KEY)
"""The secrets of a stage that a publish needs."""

Secrets = dict[tuple[volumes.VolumeId, str], Mapping[str, str]]
"""What opens staged volumes, by volume and staging path."""


def stage(request: csi_pb2.NodeStageVolumeRequest) -> Stage:
    """NodeStageVolume."""
    volume_id = requests.volume_id(request.volume_id)
    path = volumes.TargetPath.parse(request.staging_target_path, role="staging_target_path")
    capability = _capability(request)
    access = Access(
        capability.mode,
        readonly=capability.mode.reader_only,
        on_host=isinstance(capability.access, volumes.BlockAccess),
        secrets=dict(request.secrets),
    )
    return Stage(volume_id, path, capability, access)


def publish(request: csi_pb2.NodePublishVolumeRequest, of_stages: Secrets) -> Publish:
    """NodePublishVolume, with the secrets of its stage. Raises `requests.StagingPathNotGiven`."""
    volume_id = requests.volume_id(request.volume_id)
    target = volumes.TargetPath.parse(request.target_path)
    capability = _capability(request)
    staging = request.staging_target_path
    if not staging:
        raise requests.StagingPathNotGiven()
    secrets = {**of_stages.get((volume_id, staging), {}), **kept_secrets(request)}
    return Publish(
        volume_id=volume_id,
        target=target,
        staging=volumes.TargetPath.parse(staging, role="staging_target_path"),
        capability=capability,
        readonly=request.readonly,
        deferred=request.defer_fs_ops,
        volume_context=tuple(sorted(request.volume_context.items())),
        publish_context=tuple(sorted(request.publish_context.items())),
        secrets=secrets,
    )


def kept_secrets(
    request: csi_pb2.NodeStageVolumeRequest | csi_pb2.NodePublishVolumeRequest,
) -> Mapping[str, str]:
    """Those of a request's secrets that a publish needs."""
    return {key: request.secrets[key] for key in _KEPT if request.secrets.get(key)}


def optional_path(text: str, role: str) -> volumes.TargetPath | None:
    """None for an empty one."""
    return volumes.TargetPath.parse(text, role=role) if text else None


def _capability(
    request: csi_pb2.NodeStageVolumeRequest | csi_pb2.NodePublishVolumeRequest,
) -> volumes.VolumeCapability:
    """The capability of a request whose contexts are not too long."""
    if not request.HasField("volume_capability"):
        raise requests.MissingField("volume_capability")
    capability = csi.capability(request.volume_capability)
    requests.check_context(request.volume_context, "volume_context")
    requests.check_context(request.publish_context, "publish_context")
    return capability


def places(segment: str) -> tuple[csi_pb2.Topology, ...]:
    """The topology of this node; none where every node reaches the pool."""
    return (csi_pb2.Topology(segments={topology.KEY: segment}),) if segment else ()


def volume(record: VolumeRecord, segment: str) -> csi_pb2.Volume:
    """A volume, and its topology."""
    pb = csi_pb2.Volume(
        volume_id=record.volume_id,
        capacity_bytes=record.capacity_bytes,
        volume_context=class_parameters.volume_context(record.parameters),
        accessible_topology=places(segment),
    )
    source = record.content_source
    if source is not None and source.kind == "snapshot":
        pb.content_source.snapshot.snapshot_id = source.id
    elif source is not None:
        pb.content_source.volume.volume_id = source.id
    return pb


L = TypeVar("L", csi_pb2.ListVolumesResponse.Entry, csi_pb2.ControllerGetVolumeResponse)


def listed(pb: L, value: Listed, segment: str, role: Role) -> L:
    """Fill an entry of ListVolumes, or ControllerGetVolume's answer; without a readable record its size is 0."""
    if value.record is None:
        pb.volume.volume_id = value.volume_id
        pb.volume.accessible_topology.extend(places(segment))
    else:
        pb.volume.CopyFrom(volume(value.record, segment))
    pb.status.published_node_ids.extend(value.nodes)
    if role.tells_condition:
        pb.status.volume_condition.CopyFrom(csi.condition_to_wire(value.health.condition))
    return pb


def health(value: Health) -> csi_pb2.VolumeHealth:
    """A volume's health (CSI 1.13): healthy without entries."""
    pb = csi_pb2.VolumeHealth(volume_id=value.volume_id)
    for finding in value.findings:
        pb.health_statuses.add(
            status=csi_pb2.VolumeHealthErrorType.ValueType(finding.kind.value),
            reason=finding.reason,
            message=requests.shortened(finding.message),
        )
    return pb


def pool_health(findings: tuple[PoolFinding, ...]) -> csi_pb2.NodeGetStorageHealthResponse:
    """The pool's health (CSI 1.13)."""
    pb = csi_pb2.NodeGetStorageHealthResponse()
    for finding in findings:
        kind = csi_pb2.STORAGE_DEGRADED if finding.reachable else csi_pb2.STORAGE_UNREACHABLE
        pb.backend_health.add(
            status=kind, reason=finding.reason, message=requests.shortened(finding.message)
        )
    return pb
