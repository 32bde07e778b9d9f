"""CSI Controller of a cluster: checks what routing needs, and sends each call to the node that has the pool.

All else in a request is for the node's driver to check: its answer is passed on. What is decided here is in `create`,
`names`, `listing` and `routing`.
"""

from typing import Protocol

from crust import errors, pool_ids
from crust.cluster.central import routing
from crust.cluster.central.calls import ClusterCalls, Context, left_s
from crust.cluster.protocol import NodeAbsent
from crust.rpc.messages import limits
from crust.rpc.serving.interceptors import RpcNotServed
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

NODE_ID_MAX_BYTES = 256


class VolumeOfOtherNode(errors.NotReady):
    """A volume is to be published to a node that does not have its pool (CSI: FAILED_PRECONDITION, with the node)."""

    def __init__(self, volume_id: str, node_id: str, wanted: str) -> None:
        super().__init__(
            f"{volume_id} cannot be published to {wanted}",
            why=f"its pool is at the node {node_id}",
            hint="schedule the pod to that node",
        )
        self.node_id = node_id


class NodeUnknown(errors.NotFound):
    """No node of this id was ever announced."""

    def __init__(self, node_id: str) -> None:
        super().__init__(f"there is no node {node_id!r}", why="none of this id ever connected")
        self.node_id = node_id


class DescribesController(Protocol):
    """Answers what the nodes' drivers can do."""

    async def ControllerGetCapabilities(
        self, request: csi_pb2.ControllerGetCapabilitiesRequest, context: Context
    ) -> csi_pb2.ControllerGetCapabilitiesResponse:
        """See CSI."""
        ...


class ClusterController(csi_pb2_grpc.ControllerServicer):
    """The Controller service. `has_health`: whether the nodes' drivers tell the health of volumes (CSI 1.13)."""

    def __init__(
        self, calls: ClusterCalls, described: DescribesController, *, has_health: bool
    ) -> None:
        self._calls = calls
        self._described = described
        self._has_health = has_health

    async def ControllerGetCapabilities(
        self, request: csi_pb2.ControllerGetCapabilitiesRequest, context: Context
    ) -> csi_pb2.ControllerGetCapabilitiesResponse:
        """What the nodes' drivers can do."""
        return await self._described.ControllerGetCapabilities(request, context)

    async def CreateVolume(
        self, request: csi_pb2.CreateVolumeRequest, context: Context
    ) -> csi_pb2.CreateVolumeResponse:
        """Placed, once for a name."""
        limits.required(request.name, "name")
        return await self._calls.operation(
            "CreateVolume", request, context, lambda: self._calls.placement.create(request)
        )

    async def DeleteVolume(
        self, request: csi_pb2.DeleteVolumeRequest, context: Context
    ) -> csi_pb2.DeleteVolumeResponse:
        """Routed; then the name is free."""
        key = pool_ids.key_of(limits.volume_id(request.volume_id))
        await self._calls.removal("DeleteVolume", request, context, key=key)
        return csi_pb2.DeleteVolumeResponse()

    async def ControllerPublishVolume(
        self, request: csi_pb2.ControllerPublishVolumeRequest, context: Context
    ) -> csi_pb2.ControllerPublishVolumeResponse:
        """Routed, if the node has the pool. Raises `VolumeOfOtherNode`."""
        volume_id = limits.volume_id(request.volume_id)
        wanted = limits.required(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
        node_id = self._calls.router.find(routing.pool_of(volume_id)).node_id
        if wanted != node_id and self._is_node(wanted):
            raise VolumeOfOtherNode(volume_id, node_id, wanted)
        response: csi_pb2.ControllerPublishVolumeResponse = await self._calls.change(
            "ControllerPublishVolume", request, context
        )
        return response

    async def ControllerUnpublishVolume(
        self, request: csi_pb2.ControllerUnpublishVolumeRequest, context: Context
    ) -> csi_pb2.ControllerUnpublishVolumeResponse:
        """Routed; from a node that was retired it is unpublished."""
        limits.volume_id(request.volume_id)
        await self._calls.removal("ControllerUnpublishVolume", request, context)
        return csi_pb2.ControllerUnpublishVolumeResponse()

    async def ValidateVolumeCapabilities(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest, context: Context
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        """Routed."""
        pool_id = routing.pool_of(limits.volume_id(request.volume_id))
        response: csi_pb2.ValidateVolumeCapabilitiesResponse = await self._calls.read(
            "ValidateVolumeCapabilities", pool_id, request, context
        )
        return response

    async def ListVolumes(
        self, request: csi_pb2.ListVolumesRequest, context: Context
    ) -> csi_pb2.ListVolumesResponse:
        """Of all pools."""
        return await self._calls.lists.volumes(request, left_s(context))

    async def ControllerGetVolume(
        self, request: csi_pb2.ControllerGetVolumeRequest, context: Context
    ) -> csi_pb2.ControllerGetVolumeResponse:
        """Routed."""
        pool_id = routing.pool_of(limits.volume_id(request.volume_id))
        response: csi_pb2.ControllerGetVolumeResponse = await self._calls.read(
            "ControllerGetVolume", pool_id, request, context
        )
        return response

    async def ControllerListVolumeHealth(
        self, request: csi_pb2.ControllerListVolumeHealthRequest, context: Context
    ) -> csi_pb2.ControllerListVolumeHealthResponse:
        """Of all pools."""
        self._check_health("ControllerListVolumeHealth")
        return await self._calls.lists.health(request, left_s(context))

    async def ControllerGetVolumeHealth(
        self, request: csi_pb2.ControllerGetVolumeHealthRequest, context: Context
    ) -> csi_pb2.ControllerGetVolumeHealthResponse:
        """Routed."""
        self._check_health("ControllerGetVolumeHealth")
        pool_id = routing.pool_of(limits.volume_id(request.volume_id))
        response: csi_pb2.ControllerGetVolumeHealthResponse = await self._calls.read(
            "ControllerGetVolumeHealth", pool_id, request, context
        )
        return response

    async def GetCapacity(
        self, request: csi_pb2.GetCapacityRequest, context: Context
    ) -> csi_pb2.GetCapacityResponse:
        """Of the connected pools in the topology."""
        return await self._calls.lists.capacity(request)

    async def ControllerExpandVolume(
        self, request: csi_pb2.ControllerExpandVolumeRequest, context: Context
    ) -> csi_pb2.ControllerExpandVolumeResponse:
        """Routed."""
        limits.volume_id(request.volume_id)
        response: csi_pb2.ControllerExpandVolumeResponse = await self._calls.change(
            "ControllerExpandVolume", request, context
        )
        return response

    async def ControllerModifyVolume(
        self, request: csi_pb2.ControllerModifyVolumeRequest, context: Context
    ) -> csi_pb2.ControllerModifyVolumeResponse:
        """Routed."""
        limits.volume_id(request.volume_id)
        response: csi_pb2.ControllerModifyVolumeResponse = await self._calls.change(
            "ControllerModifyVolume", request, context
        )
        return response

    async def CreateSnapshot(
        self, request: csi_pb2.CreateSnapshotRequest, context: Context
    ) -> csi_pb2.CreateSnapshotResponse:
        """Made where its source is, once for a name."""
        source = limits.required(request.source_volume_id, "source_volume_id")
        limits.required(request.name, "name")
        response: csi_pb2.CreateSnapshotResponse = await self._calls.copy(
            "CreateSnapshot", "snapshot", request, (source,), context
        )
        return response

    async def DeleteSnapshot(
        self, request: csi_pb2.DeleteSnapshotRequest, context: Context
    ) -> csi_pb2.DeleteSnapshotResponse:
        """Routed; then the name is free."""
        key = pool_ids.key_of(limits.required(request.snapshot_id, "snapshot_id"))
        await self._calls.removal("DeleteSnapshot", request, context, key=key)
        return csi_pb2.DeleteSnapshotResponse()

    async def ListSnapshots(
        self, request: csi_pb2.ListSnapshotsRequest, context: Context
    ) -> csi_pb2.ListSnapshotsResponse:
        """Of all pools, or of the one that is named."""
        return await self._calls.lists.snapshots(request, left_s(context))

    async def GetSnapshot(
        self, request: csi_pb2.GetSnapshotRequest, context: Context
    ) -> csi_pb2.GetSnapshotResponse:
        """Routed."""
        pool_id = routing.pool_of(limits.required(request.snapshot_id, "snapshot_id"))
        response: csi_pb2.GetSnapshotResponse = await self._calls.read(
            "GetSnapshot", pool_id, request, context
        )
        return response

    async def ControllerGetNodeInfo(
        self, request: csi_pb2.ControllerGetNodeInfoRequest, context: Context
    ) -> csi_pb2.ControllerGetNodeInfoResponse:
        """The node's own answer."""
        node_id = limits.required(request.node_id, "node_id", limit_bytes=NODE_ID_MAX_BYTES)
        pool_id = self._pool_at(node_id)
        response: csi_pb2.ControllerGetNodeInfoResponse = await self._calls.read(
            "ControllerGetNodeInfo", pool_id, request, context
        )
        return response

    def _check_health(self, rpc: str) -> None:
        if not self._has_health:
            raise RpcNotServed(rpc)

    def _is_node(self, node_id: str) -> bool:
        store = self._calls.router.store
        return node_id in store.nodes() or node_id in store.known_pools().values()

    def _pool_at(self, node_id: str) -> str:
        store = self._calls.router.store
        announced = store.nodes().get(node_id)
        if announced is not None:
            return announced.pool_id
        for pool_id, known in store.known_pools().items():
            if known == node_id:
                raise NodeAbsent(pool_id, node_id)
        raise NodeUnknown(node_id)
