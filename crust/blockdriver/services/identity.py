"""CSI Identity: the driver's name, its capabilities, and whether it can serve now."""

from dataclasses import dataclass

import crust
from crust.blockdriver.engines.protocol import Provisioning
from crust.blockdriver.services.roles import Role
from crust.core import deferral_keys, errors, operations
from crust.rpc.call import Call
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2

_Capability = csi_pb2.PluginCapability

_REASON_MAX_BYTES = 2048
_PROBE_TIMEOUT_S = 1.5
"""With the wait for a thread less than the 3 s of Kubernetes' livenessprobe."""


@dataclass(slots=True)
class Identity:
    _name: str
    _provisioning: Provisioning
    _role: Role
    _running: operations.KeyedOperations
    problem: errors.CrustError | None = None
    """Why the pool is not open; `PoolWatch` sets it."""

    async def GetPluginInfo(
        self, request: csi_pb2.GetPluginInfoRequest, call: Call
    ) -> csi_pb2.GetPluginInfoResponse:
        """Name and version; and whether the controller attaches volumes, for a node's proxy."""
        return csi_pb2.GetPluginInfoResponse(
            name=self._name,
            vendor_version=crust.__version__,
            manifest={deferral_keys.ATTACHES: str(self._role.attaches).lower()},
        )

    async def GetPluginCapabilities(
        self, request: csi_pb2.GetPluginCapabilitiesRequest, call: Call
    ) -> csi_pb2.GetPluginCapabilitiesResponse:
        """Topology of volumes, online expansion; of the controller part, if it is served, its services."""
        types = _Capability.Service
        has_topology = not self._role.is_shared
        services = [types.VOLUME_ACCESSIBILITY_CONSTRAINTS] if has_topology else []
        if self._role.has_controller:
            services += (
                types.CONTROLLER_SERVICE,
                types.GROUP_CONTROLLER_SERVICE,
                types.SNAPSHOT_METADATA_SERVICE,
            )
        if self._role.has_controller and has_topology and self._role.csi_profile == "1.13":
            services.append(types.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS)
        expansion = _Capability.VolumeExpansion(type=_Capability.VolumeExpansion.ONLINE)
        return csi_pb2.GetPluginCapabilitiesResponse(
            capabilities=[
                *(_Capability(service=types(type=service)) for service in services),
                _Capability(volume_expansion=expansion),
            ]
        )

    async def Probe(self, request: csi_pb2.ProbeRequest, call: Call) -> csi_pb2.ProbeResponse:
        """Ready; not ready while the pool is absent; FAILED_PRECONDITION with the reason; UNAVAILABLE while no thread
        is free for new work.

        It reads no volume: a volume that hangs does not fail it, until such volumes hold all threads.
        """
        if self.problem is None:
            try:
                await self.check_pool()
            except errors.CrustError:
                if self.problem is None:  # else the pool went away between the two questions
                    raise
        response = csi_pb2.ProbeResponse()
        response.ready.value = self.problem is None
        # CSI: not ready, and no error: sidecars wait, and do not exit. crust's own commands get the reason.
        if self.problem is not None and extensions.requested(call.metadata, extensions.ERROR_INFO):
            reason = self.problem.shown().encode()[:_REASON_MAX_BYTES]
            call.trailing = ((extensions.NOT_READY, reason),)
        return response

    async def check_pool(self) -> None:
        """Raise `PoolNotResponding`, or why the pool cannot be used now."""
        check = self._provisioning.check_usable
        try:
            await self._running.look("Probe of the pool", check, timeout_s=_PROBE_TIMEOUT_S)
        except operations.SystemCallTimedOut as err:
            raise errors.NotReady.named(
                "PoolNotResponding",
                "the block driver cannot serve volumes",
                why=f"its pool has not answered for {err.timeout_s:g} s",
            ) from err
