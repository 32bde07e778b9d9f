"""CSI SnapshotMetadata of a cluster.

A node answers with the first message of its stream, which is bounded; the next one is asked for from the end of that
one on, until one is empty.
"""

from collections.abc import AsyncIterator
from typing import Any

from crust.cluster.central import routing
from crust.cluster.central.calls import ClusterCalls, Context
from crust.rpc.messages import limits
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc


class ClusterSnapshotMetadata(csi_pb2_grpc.SnapshotMetadataServicer):
    """The SnapshotMetadata service."""

    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls

    async def GetMetadataAllocated(
        self, request: csi_pb2.GetMetadataAllocatedRequest, context: Context
    ) -> AsyncIterator[csi_pb2.GetMetadataAllocatedResponse]:
        """Routed."""
        snapshot_id = limits.required(request.snapshot_id, "snapshot_id")
        async for each in self._messages("GetMetadataAllocated", snapshot_id, request, context):
            yield each

    async def GetMetadataDelta(
        self, request: csi_pb2.GetMetadataDeltaRequest, context: Context
    ) -> AsyncIterator[csi_pb2.GetMetadataDeltaResponse]:
        """Routed by the target; the base is in the same pool, or the node refuses it."""
        limits.required(request.base_snapshot_id, "base_snapshot_id")
        snapshot_id = limits.required(request.target_snapshot_id, "target_snapshot_id")
        async for each in self._messages("GetMetadataDelta", snapshot_id, request, context):
            yield each

    async def _messages(
        self, name: str, snapshot_id: str, request: Any, context: Context
    ) -> AsyncIterator[Any]:
        pool_id = routing.pool_of(snapshot_id)
        asked = type(request)()
        asked.CopyFrom(request)
        while True:
            got = await self._calls.read(name, pool_id, asked, context)
            if not got.block_metadata:
                return
            yield got
            last = got.block_metadata[-1]
            asked.starting_offset = last.byte_offset + last.size_bytes
            if asked.starting_offset >= got.volume_capacity_bytes:
                return
