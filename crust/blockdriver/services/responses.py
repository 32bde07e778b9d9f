"""The controller's responses as protobuf. Differences between CSI 1.12 and 1.13 are here, by profile."""

from crust.blockdriver.controller import topology
from crust.blockdriver.controller.create_volume import Volume
from crust.blockdriver.controller.list_volumes import Listed
from crust.blockdriver.records.health import Health, PoolFinding
from crust.rpc.messages import csi, limits
from crust.wire.csi.v1 import csi_pb2


def places(segment: str) -> tuple[csi_pb2.Topology, ...]:
    """The topology of this node; none where every node reaches the pool."""
    return (csi_pb2.Topology(segments={topology.KEY: segment}),) if segment else ()


def volume(value: Volume, segment: str) -> csi_pb2.Volume:
    """A volume, and its topology."""
    pb = csi_pb2.Volume(
        volume_id=value.volume_id,
        capacity_bytes=value.capacity_bytes,
        volume_context=value.context,
        accessible_topology=places(segment),
    )
    if value.source is not None and value.source.kind == "snapshot":
        pb.content_source.snapshot.snapshot_id = value.source.id
    elif value.source is not None:
        pb.content_source.volume.volume_id = value.source.id
    return pb


def entry(
    value: Listed, segment: str, *, tell_condition: bool
) -> csi_pb2.ListVolumesResponse.Entry:
    """An entry of ListVolumes."""
    pb = csi_pb2.ListVolumesResponse.Entry(volume=volume(value.volume, segment))
    pb.status.published_node_ids.extend(value.nodes)
    if tell_condition:
        pb.status.volume_condition.CopyFrom(csi.condition_to_wire(value.health.condition))
    return pb


def got(
    value: Listed, segment: str, *, tell_condition: bool
) -> csi_pb2.ControllerGetVolumeResponse:
    """ControllerGetVolume's answer."""
    pb = csi_pb2.ControllerGetVolumeResponse(volume=volume(value.volume, segment))
    pb.status.published_node_ids.extend(value.nodes)
    if tell_condition:
        pb.status.volume_condition.CopyFrom(csi.condition_to_wire(value.health.condition))
    return pb


def health(value: Health) -> csi_pb2.VolumeHealth:
    """A volume's health (CSI 1.13): healthy without entries."""
    pb = csi_pb2.VolumeHealth(volume_id=value.volume_id)
    for finding in value.findings:
        pb.health_statuses.add(
            status=csi_pb2.VolumeHealthErrorType.ValueType(finding.kind.value),
            reason=finding.reason,
            message=limits.shortened(finding.message),
        )
    return pb


def pool_health(findings: tuple[PoolFinding, ...]) -> csi_pb2.NodeGetStorageHealthResponse:
    """The pool's health (CSI 1.13)."""
    pb = csi_pb2.NodeGetStorageHealthResponse()
    for finding in findings:
        kind = csi_pb2.STORAGE_DEGRADED if finding.reachable else csi_pb2.STORAGE_UNREACHABLE
        pb.backend_health.add(
            status=kind, reason=finding.reason, message=limits.shortened(finding.message)
        )
    return pb
