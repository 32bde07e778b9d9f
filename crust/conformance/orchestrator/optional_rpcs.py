"""Every RPC that depends on a capability, with a request that would be served if the capability were advertised."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crust.conformance import case
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.volume_capabilities import mount
from crust.wire.csi.v1 import csi_pb2

_ID = "vol-0000000000000000000000000000000000000000"


@dataclass(frozen=True, slots=True)
class Rpc:
    """One RPC. `method` finds it in a CO's stubs."""

    needs: str
    method: Callable[[Co], Any]
    request: Any
    streams: bool = False


RPCS = (
    Rpc(
        case.CREATE,
        lambda co: co.controller.CreateVolume,
        csi_pb2.CreateVolumeRequest(name="conformance", volume_capabilities=[mount()]),
    ),
    Rpc(
        case.CREATE,
        lambda co: co.controller.DeleteVolume,
        csi_pb2.DeleteVolumeRequest(volume_id=_ID),
    ),
    Rpc(
        "controller",
        lambda co: co.controller.ValidateVolumeCapabilities,
        csi_pb2.ValidateVolumeCapabilitiesRequest(volume_id=_ID, volume_capabilities=[mount()]),
    ),
    Rpc(
        case.PUBLISH,
        lambda co: co.controller.ControllerPublishVolume,
        csi_pb2.ControllerPublishVolumeRequest(
            volume_id=_ID, node_id="node", volume_capability=mount()
        ),
    ),
    Rpc(
        case.PUBLISH,
        lambda co: co.controller.ControllerUnpublishVolume,
        csi_pb2.ControllerUnpublishVolumeRequest(volume_id=_ID, node_id="node"),
    ),
    Rpc(case.LIST, lambda co: co.controller.ListVolumes, csi_pb2.ListVolumesRequest()),
    Rpc(
        case.GET,
        lambda co: co.controller.ControllerGetVolume,
        csi_pb2.ControllerGetVolumeRequest(volume_id=_ID),
    ),
    Rpc(case.CAPACITY, lambda co: co.controller.GetCapacity, csi_pb2.GetCapacityRequest()),
    Rpc(
        case.SNAPSHOT,
        lambda co: co.controller.CreateSnapshot,
        csi_pb2.CreateSnapshotRequest(source_volume_id=_ID, name="conformance"),
    ),
    Rpc(
        case.SNAPSHOT,
        lambda co: co.controller.DeleteSnapshot,
        csi_pb2.DeleteSnapshotRequest(snapshot_id=_ID),
    ),
    Rpc(
        case.LIST_SNAPSHOTS, lambda co: co.controller.ListSnapshots, csi_pb2.ListSnapshotsRequest()
    ),
    Rpc(
        case.GET_SNAPSHOT,
        lambda co: co.controller.GetSnapshot,
        csi_pb2.GetSnapshotRequest(snapshot_id=_ID),
    ),
    Rpc(
        case.EXPAND,
        lambda co: co.controller.ControllerExpandVolume,
        csi_pb2.ControllerExpandVolumeRequest(
            volume_id=_ID, capacity_range=csi_pb2.CapacityRange(required_bytes=1)
        ),
    ),
    Rpc(
        case.MODIFY,
        lambda co: co.controller.ControllerModifyVolume,
        csi_pb2.ControllerModifyVolumeRequest(volume_id=_ID, mutable_parameters={"a": "b"}),
    ),
    Rpc(
        "controller.GET_VOLUME_HEALTH",
        lambda co: co.controller.ControllerGetVolumeHealth,
        csi_pb2.ControllerGetVolumeHealthRequest(volume_id=_ID),
    ),
    Rpc(
        "controller.LIST_VOLUME_HEALTH",
        lambda co: co.controller.ControllerListVolumeHealth,
        csi_pb2.ControllerListVolumeHealthRequest(),
    ),
    Rpc(
        case.GROUP,
        lambda co: co.groups.CreateVolumeGroupSnapshot,
        csi_pb2.CreateVolumeGroupSnapshotRequest(name="conformance", source_volume_ids=[_ID]),
    ),
    Rpc(
        case.GROUP,
        lambda co: co.groups.DeleteVolumeGroupSnapshot,
        csi_pb2.DeleteVolumeGroupSnapshotRequest(group_snapshot_id=_ID),
    ),
    Rpc(
        case.GROUP,
        lambda co: co.groups.GetVolumeGroupSnapshot,
        csi_pb2.GetVolumeGroupSnapshotRequest(group_snapshot_id=_ID),
    ),
    Rpc(
        case.METADATA,
        lambda co: co.metadata.GetMetadataAllocated,
        csi_pb2.GetMetadataAllocatedRequest(snapshot_id=_ID),
        streams=True,
    ),
    Rpc(
        case.METADATA,
        lambda co: co.metadata.GetMetadataDelta,
        csi_pb2.GetMetadataDeltaRequest(base_snapshot_id=_ID, target_snapshot_id=_ID),
        streams=True,
    ),
    Rpc(
        case.STAGE,
        lambda co: co.node.NodeStageVolume,
        csi_pb2.NodeStageVolumeRequest(
            volume_id=_ID, staging_target_path="/a", volume_capability=mount()
        ),
    ),
    Rpc(
        case.STAGE,
        lambda co: co.node.NodeUnstageVolume,
        csi_pb2.NodeUnstageVolumeRequest(volume_id=_ID, staging_target_path="/a"),
    ),
    Rpc(
        case.NODE,
        lambda co: co.node.NodePublishVolume,
        csi_pb2.NodePublishVolumeRequest(
            volume_id=_ID, staging_target_path="/a", target_path="/b", volume_capability=mount()
        ),
    ),
    Rpc(
        case.NODE,
        lambda co: co.node.NodeUnpublishVolume,
        csi_pb2.NodeUnpublishVolumeRequest(volume_id=_ID, target_path="/b"),
    ),
    Rpc(
        case.STATS,
        lambda co: co.node.NodeGetVolumeStats,
        csi_pb2.NodeGetVolumeStatsRequest(volume_id=_ID, volume_path="/a"),
    ),
    Rpc(
        case.NODE_EXPAND,
        lambda co: co.node.NodeExpandVolume,
        csi_pb2.NodeExpandVolumeRequest(volume_id=_ID, volume_path="/a"),
    ),
    Rpc(
        "node.GET_VOLUME_HEALTH",
        lambda co: co.node.NodeGetVolumeHealth,
        csi_pb2.NodeGetVolumeHealthRequest(volume_id=_ID, volume_publish_path="/a"),
    ),
    Rpc(
        "node.GET_STORAGE_HEALTH",
        lambda co: co.node.NodeGetStorageHealth,
        csi_pb2.NodeGetStorageHealthRequest(),
    ),
)
