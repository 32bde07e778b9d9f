"""CSI Identity: who the driver is, what it serves, whether it can serve now."""

import asyncio
from typing import Any

import grpc.aio

import crust
from crust.blockdriver.backends.protocol import Backend
from crust.blockdriver.node import CsiProfile
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
_Capability = csi_pb2.PluginCapability


class Identity(csi_pb2_grpc.IdentityServicer):
    """The Identity service."""

    def __init__(self, name: str, backend: Backend, csi_profile: CsiProfile) -> None:
        self._name = name
        self._backend = backend
        self._csi_profile = csi_profile

    async def GetPluginInfo(
        self, request: csi_pb2.GetPluginInfoRequest, context: Context
    ) -> csi_pb2.GetPluginInfoResponse:
        """Name and version."""
        return csi_pb2.GetPluginInfoResponse(name=self._name, vendor_version=crust.__version__)

    async def GetPluginCapabilities(
        self, request: csi_pb2.GetPluginCapabilitiesRequest, context: Context
    ) -> csi_pb2.GetPluginCapabilitiesResponse:
        """A controller, volumes (in CSI 1.13 snapshots too) that live on one node, expansion of volumes in use."""
        types = _Capability.Service
        services = [
            types.CONTROLLER_SERVICE,
            types.VOLUME_ACCESSIBILITY_CONSTRAINTS,
            types.GROUP_CONTROLLER_SERVICE,
            types.SNAPSHOT_METADATA_SERVICE,
        ]
        if self._csi_profile == "1.13":
            services.append(types.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS)
        expansion = _Capability.VolumeExpansion(type=_Capability.VolumeExpansion.ONLINE)
        return csi_pb2.GetPluginCapabilitiesResponse(
            capabilities=[
                *(_Capability(service=types(type=each)) for each in services),
                _Capability(volume_expansion=expansion),
            ]
        )

    async def Probe(self, request: csi_pb2.ProbeRequest, context: Context) -> csi_pb2.ProbeResponse:
        """Ready, or FAILED_PRECONDITION with what is missing. Never looks at a volume: one that hangs is not us."""
        await asyncio.to_thread(self._backend.check)
        response = csi_pb2.ProbeResponse()
        response.ready.value = True
        return response
