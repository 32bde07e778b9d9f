"""Every RPC that depends on a capability, with a request that would be served if the capability were advertised."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crust.conformance.capabilities import (
    CAPACITY,
    CREATE,
    EXPAND,
    GET_SNAPSHOT,
    GROUP,
    LIST_SNAPSHOTS,
    METADATA,
    NODE,
    NODE_EXPAND,
    PUBLISH,
    SNAPSHOT,
    STAGE,
)
from crust.conformance.orchestrator.volume_capabilities import mount
from crust.wire.csi.v1 import csi_pb2

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
    """One RPC: the capability without which it is not served, and a request."""

    needs: str
    request: Any


def _rpc(needs: str, name: str, *fields: str) -> Rpc:
    values = {field: _VALUES[field] for field in fields}
    return Rpc(needs, getattr(csi_pb2, f"{name}Request")(**values))


RPCS = (
    _rpc(CREATE, "CreateVolume", "name", "volume_capabilities"),
    _rpc(CREATE, "DeleteVolume", "volume_id"),
    _rpc("controller", "ValidateVolumeCapabilities", "volume_id", "volume_capabilities"),
    _rpc(PUBLISH, "ControllerPublishVolume", "volume_id", "node_id", "volume_capability"),
    _rpc(PUBLISH, "ControllerUnpublishVolume", "volume_id", "node_id"),
    _rpc("controller.LIST_VOLUMES", "ListVolumes"),
    _rpc("controller.GET_VOLUME", "ControllerGetVolume", "volume_id"),
    _rpc(CAPACITY, "GetCapacity"),
    _rpc(SNAPSHOT, "CreateSnapshot", "source_volume_id", "name"),
    _rpc(SNAPSHOT, "DeleteSnapshot", "snapshot_id"),
    _rpc(LIST_SNAPSHOTS, "ListSnapshots"),
    _rpc(GET_SNAPSHOT, "GetSnapshot", "snapshot_id"),
    _rpc(EXPAND, "ControllerExpandVolume", "volume_id", "capacity_range"),
    _rpc("controller.MODIFY_VOLUME", "ControllerModifyVolume", "volume_id", "mutable_parameters"),
    _rpc("controller.GET_VOLUME_HEALTH", "ControllerGetVolumeHealth", "volume_id"),
    _rpc("controller.LIST_VOLUME_HEALTH", "ControllerListVolumeHealth"),
    _rpc(GROUP, "CreateVolumeGroupSnapshot", "name", "source_volume_ids"),
    _rpc(GROUP, "DeleteVolumeGroupSnapshot", "group_snapshot_id"),
    _rpc(GROUP, "GetVolumeGroupSnapshot", "group_snapshot_id"),
    _rpc(METADATA, "GetMetadataAllocated", "snapshot_id"),
    _rpc(METADATA, "GetMetadataDelta", "base_snapshot_id", "target_snapshot_id"),
    _rpc(STAGE, "NodeStageVolume", "volume_id", "staging_target_path", "volume_capability"),
    _rpc(STAGE, "NodeUnstageVolume", "volume_id", "staging_target_path"),
    _rpc(
        NODE,
        "NodePublishVolume",
        "volume_id",
        "staging_target_path",
        "target_path",
        "volume_capability",
    ),
    _rpc(NODE, "NodeUnpublishVolume", "volume_id", "target_path"),
    _rpc("node.GET_VOLUME_STATS", "NodeGetVolumeStats", "volume_id", "volume_path"),
    _rpc(NODE_EXPAND, "NodeExpandVolume", "volume_id", "volume_path"),
    _rpc("node.GET_VOLUME_HEALTH", "NodeGetVolumeHealth", "volume_id", "volume_publish_path"),
    _rpc("node.GET_STORAGE_HEALTH", "NodeGetStorageHealth"),
)
