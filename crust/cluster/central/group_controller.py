"""CSI GroupController of a cluster: a group is of volumes in one pool.

A group is frozen and taken by one node, because only that node can stop the writers of all members at one point in
time. Volumes of several pools are refused.
"""

from typing import Protocol

from crust import pool_ids
from crust.cluster.central import routing
from crust.cluster.central.calls import ClusterCalls, Context
from crust.rpc.messages import limits
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc


class DescribesGroups(Protocol):
    """Answers what the nodes' drivers can do."""

    async def GroupControllerGetCapabilities(
        self, request: csi_pb2.GroupControllerGetCapabilitiesRequest, context: Context
    ) -> csi_pb2.GroupControllerGetCapabilitiesResponse:
        """See CSI."""
        ...


class ClusterGroupController(csi_pb2_grpc.GroupControllerServicer):
    """The GroupController service."""

    def __init__(self, calls: ClusterCalls, described: DescribesGroups) -> None:
        self._calls = calls
        self._described = described

    async def GroupControllerGetCapabilities(
        self, request: csi_pb2.GroupControllerGetCapabilitiesRequest, context: Context
    ) -> csi_pb2.GroupControllerGetCapabilitiesResponse:
        """What the nodes' drivers can do."""
        return await self._described.GroupControllerGetCapabilities(request, context)

    async def CreateVolumeGroupSnapshot(
        self, request: csi_pb2.CreateVolumeGroupSnapshotRequest, context: Context
    ) -> csi_pb2.CreateVolumeGroupSnapshotResponse:
        """Made where its sources are, once for a name. Raises `MissingField` without sources."""
        limits.required(request.name, "name")
        sources = tuple(
            limits.required(each, f"source_volume_ids[{n}]")
            for n, each in enumerate(request.source_volume_ids)
        )
        if not sources:
            raise limits.MissingField("source_volume_ids")
        response: csi_pb2.CreateVolumeGroupSnapshotResponse = await self._calls.copy(
            "CreateVolumeGroupSnapshot", "group", request, sources, context
        )
        return response

    async def DeleteVolumeGroupSnapshot(
        self, request: csi_pb2.DeleteVolumeGroupSnapshotRequest, context: Context
    ) -> csi_pb2.DeleteVolumeGroupSnapshotResponse:
        """Routed; then the name is free, and no record of a member is left."""
        key = pool_ids.key_of(limits.required(request.group_snapshot_id, "group_snapshot_id"))
        members = tuple(request.snapshot_ids)
        await self._calls.removal(
            "DeleteVolumeGroupSnapshot", request, context, key=key, members=members
        )
        return csi_pb2.DeleteVolumeGroupSnapshotResponse()

    async def GetVolumeGroupSnapshot(
        self, request: csi_pb2.GetVolumeGroupSnapshotRequest, context: Context
    ) -> csi_pb2.GetVolumeGroupSnapshotResponse:
        """Routed."""
        group_id = limits.required(request.group_snapshot_id, "group_snapshot_id")
        response: csi_pb2.GetVolumeGroupSnapshotResponse = await self._calls.read(
            "GetVolumeGroupSnapshot", routing.pool_of(group_id), request, context
        )
        return response
