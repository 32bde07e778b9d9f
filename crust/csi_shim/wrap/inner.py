"""The calls that the shim itself makes to the driver that it wraps.

They belong to operations that outlive their caller, so they have deadlines of their own. The driver knows nothing of
crust: the metadata is the caller's without the opt-in, and no request has a field or a key of crust.
"""

from crust.rpc.messages import extensions
from crust.rpc.port import Port, stub
from crust.rpc.status import Metadata
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

TIMEOUT_S = 100.0
"""Below the proxy's deadline for the shim, so that the proxy gets the driver's status."""


def plain(metadata: Metadata) -> Metadata:
    """The caller's metadata without the opt-in."""
    return tuple(pair for pair in metadata if pair[0] != extensions.KEY)


class InnerNode:
    """The Node service of the wrapped driver. Each method raises `PeerStatus`, the driver's own."""

    def __init__(self, driver: Port) -> None:
        self._stub = stub(csi_pb2_grpc.NodeStub, driver)

    async def stage(self, request: csi_pb2.NodeStageVolumeRequest, metadata: Metadata) -> None:
        """NodeStageVolume."""
        await self._stub.NodeStageVolume(request, metadata=plain(metadata), timeout=TIMEOUT_S)

    async def unstage(self, volume_id: str, path: str, metadata: Metadata) -> None:
        """NodeUnstageVolume."""
        request = csi_pb2.NodeUnstageVolumeRequest(volume_id=volume_id, staging_target_path=path)
        await self._stub.NodeUnstageVolume(request, metadata=plain(metadata), timeout=TIMEOUT_S)

    async def publish(
        self, request: csi_pb2.NodePublishVolumeRequest, metadata: Metadata
    ) -> csi_pb2.NodePublishVolumeResponse:
        """NodePublishVolume."""
        return await self._stub.NodePublishVolume(
            request, metadata=plain(metadata), timeout=TIMEOUT_S
        )

    async def unpublish(self, volume_id: str, path: str, metadata: Metadata) -> None:
        """NodeUnpublishVolume."""
        request = csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=path)
        await self._stub.NodeUnpublishVolume(request, metadata=plain(metadata), timeout=TIMEOUT_S)

    async def expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, metadata: Metadata
    ) -> csi_pb2.NodeExpandVolumeResponse:
        """NodeExpandVolume."""
        return await self._stub.NodeExpandVolume(
            request, metadata=plain(metadata), timeout=TIMEOUT_S
        )
