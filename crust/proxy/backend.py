"""The calls that the proxy itself makes to the shim behind one CSI socket.

They belong to operations that outlive their caller, so they have deadlines of their own. Their metadata is the
caller's with the opt-in to deferral added. A status of the shim or its driver is raised unchanged (`PeerStatus`), and
the CSI frontend passes it on.
"""

from dataclasses import dataclass

from crust.rpc.driver_facts import DriverFacts
from crust.rpc.messages import extensions
from crust.rpc.port import Port, stub
from crust.rpc.status import Metadata
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

TIMEOUT_S = 110.0
"""Below a kubelet's two minutes per call."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The part of the CO's call that goes into the proxy's calls."""

    metadata: Metadata

    def opted_in(self) -> Metadata:
        """The caller's metadata with the opt-in to deferral."""
        kept = (pair for pair in self.metadata if pair[0] != extensions.KEY)
        return (*kept, *extensions.METADATA)


class Backend:
    """The Node service of the shim."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.facts = DriverFacts(port)
        self._stub = stub(csi_pb2_grpc.NodeStub, port)

    async def aclose(self) -> None:
        """Close the port."""
        await self.facts.aclose()
        await self.port.aclose()

    async def publish(
        self, request: csi_pb2.NodePublishVolumeRequest, caller: Caller
    ) -> csi_pb2.NodePublishVolumeResponse:
        """NodePublishVolume, with the flag; for a driver that defers."""
        return await self._stub.NodePublishVolume(
            request, metadata=caller.opted_in(), timeout=TIMEOUT_S
        )

    async def unpublish(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, caller: Caller
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """NodeUnpublishVolume, with the flag where the driver knows it."""
        request.defer_fs_ops = await self.facts.defers()
        return await self._stub.NodeUnpublishVolume(
            request, metadata=caller.opted_in(), timeout=TIMEOUT_S
        )

    async def unpublish_from_host(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, caller: Caller
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """NodeUnpublishVolume of a volume that is not deferred."""
        return await self._stub.NodeUnpublishVolume(
            request, metadata=caller.metadata, timeout=TIMEOUT_S
        )

    async def stats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, caller: Caller, timeout_s: float | None
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        """NodeGetVolumeStats with the flag, within the caller's deadline: it changes nothing."""
        await self.facts.check_defers(timeout_s)
        return await self._stub.NodeGetVolumeStats(
            request, metadata=caller.opted_in(), timeout=timeout_s
        )

    async def expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, caller: Caller
    ) -> csi_pb2.NodeExpandVolumeResponse:
        """NodeExpandVolume, with the flag."""
        await self.facts.check_defers()
        return await self._stub.NodeExpandVolume(
            request, metadata=caller.opted_in(), timeout=TIMEOUT_S
        )
