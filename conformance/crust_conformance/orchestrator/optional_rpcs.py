"""Every RPC that depends on a capability, with a request that would be served if the capability were advertised."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator import capabilities
from crust_conformance.orchestrator.volume_capabilities import mount

_ID = "vol-0000000000000000000000000000000000000000"
_VALUES: Mapping[str, Any] = {
    "name": "conformance",
    "volume_id": _ID,
    "source_volume_id": _ID,
    "source_volume_ids": [_ID],
    "snapshot_id": _ID,
    "base_snapshot_id": _ID,
    "target_snapshot_id": _ID,
    "group_snapshot_id": _ID,
    "node_id": "node",
    "volume_capability": mount(),
    "volume_capabilities": [mount()],
    "capacity_range": csi_pb2.CapacityRange(required_bytes=1),
    "mutable_parameters": {"a": "b"},
    "staging_target_path": "/a",
    "target_path": "/b",
    "volume_path": "/a",
    "volume_publish_path": "/a",
}


@dataclass(frozen=True, slots=True)
class Rpc:
    """One RPC: the capability that it needs, and a request."""

    needs: str
    request: Any


def _rpc(needs: str, name: str, *fields: str) -> Rpc:
    values = {field: _VALUES[field] for field in fields}
    return Rpc(needs, getattr(csi_pb2, f"{name}Request")(**values))


RPCS = (
    _rpc(capabilities.CREATE, "CreateVolume", "name", "volume_capabilities"),
    _rpc(capabilities.CREATE, "DeleteVolume", "volume_id"),
    _rpc("controller", "ValidateVolumeCapabilities", "volume_id", "volume_capabilities"),
    _rpc(
        capabilities.PUBLISH, "ControllerPublishVolume", "volume_id", "node_id", "volume_capability"
    ),
    _rpc(capabilities.PUBLISH, "ControllerUnpublishVolume", "volume_id", "node_id"),
    _rpc("controller.LIST_VOLUMES", "ListVolumes"),
    _rpc("controller.GET_VOLUME", "ControllerGetVolume", "volume_id"),
    _rpc(capabilities.CAPACITY, "GetCapacity"),
    _rpc(capabilities.SNAPSHOT, "CreateSnapshot", "source_volume_id", "name"),
    _rpc(capabilities.SNAPSHOT, "DeleteSnapshot", "snapshot_id"),
    _rpc(capabilities.LIST_SNAPSHOTS, "ListSnapshots"),
    _rpc(capabilities.GET_SNAPSHOT, "GetSnapshot", "snapshot_id"),
    _rpc(capabilities.EXPAND, "ControllerExpandVolume", "volume_id", "capacity_range"),
    _rpc("controller.MODIFY_VOLUME", "ControllerModifyVolume", "volume_id", "mutable_parameters"),
    _rpc("controller.GET_VOLUME_HEALTH", "ControllerGetVolumeHealth", "volume_id"),
    _rpc("controller.LIST_VOLUME_HEALTH", "ControllerListVolumeHealth"),
    _rpc(capabilities.GROUP, "CreateVolumeGroupSnapshot", "name", "source_volume_ids"),
    _rpc(capabilities.GROUP, "DeleteVolumeGroupSnapshot", "group_snapshot_id"),
    _rpc(capabilities.GROUP, "GetVolumeGroupSnapshot", "group_snapshot_id"),
    _rpc(capabilities.METADATA, "GetMetadataAllocated", "snapshot_id"),
    _rpc(capabilities.METADATA, "GetMetadataDelta", "base_snapshot_id", "target_snapshot_id"),
    _rpc(
        capabilities.STAGE,
        "NodeStageVolume",
        "volume_id",
        "staging_target_path",
        "volume_capability",
    ),
    _rpc(capabilities.STAGE, "NodeUnstageVolume", "volume_id", "staging_target_path"),
    _rpc(
        capabilities.NODE,
        "NodePublishVolume",
        "volume_id",
        "staging_target_path",
        "target_path",
        "volume_capability",
    ),
    _rpc(capabilities.NODE, "NodeUnpublishVolume", "volume_id", "target_path"),
    _rpc("node.GET_VOLUME_STATS", "NodeGetVolumeStats", "volume_id", "volume_path"),
    _rpc(capabilities.NODE_EXPAND, "NodeExpandVolume", "volume_id", "volume_path"),
    _rpc("node.GET_VOLUME_HEALTH", "NodeGetVolumeHealth", "volume_id", "volume_publish_path"),
    _rpc("node.GET_STORAGE_HEALTH", "NodeGetStorageHealth"),
)
