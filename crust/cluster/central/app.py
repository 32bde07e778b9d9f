"""The central controller: its parts, and its term as leader.

Any number of them run, and one leads. The others are not ready (Probe), so the sidecars beside them wait before they
ask to lead themselves: with crust's leader are the sidecars' leaders. A controller whose term has ended ends its
process; its sidecars end with the connection, start again and wait. It keeps nothing, so a new one serves as soon as
it leads, whatever the number of volumes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from crust import errors, operations
from crust.cluster.central.calls import ClusterCalls, Context
from crust.cluster.central.controller import ClusterController, DescribesController
from crust.cluster.central.create import VolumePlacement
from crust.cluster.central.group_controller import ClusterGroupController, DescribesGroups
from crust.cluster.central.listing import ClusterLists
from crust.cluster.central.names import SETTLE_S, Names
from crust.cluster.central.routing import LOOK_EVERY_S, Router
from crust.cluster.central.snapshot_metadata import ClusterSnapshotMetadata
from crust.cluster.central.survey import Survey
from crust.cluster.forever import forever
from crust.cluster.protocol import ControllerSide, LeadershipLost
from crust.rpc.serving.server import AddServicer
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

PluginInfo = csi_pb2.GetPluginInfoResponse
PluginCapabilities = csi_pb2.GetPluginCapabilitiesResponse


class DescribesPlugin(Protocol):
    """Answers what a plugin is."""

    async def GetPluginInfo(self, request: Any, context: Context) -> PluginInfo:
        """See CSI."""
        ...

    async def GetPluginCapabilities(self, request: Any, context: Context) -> PluginCapabilities:
        """See CSI."""
        ...


@dataclass(frozen=True, slots=True)
class Described:
    """What a controller says of the nodes' drivers: servicers of a driver that answer these questions without I/O."""

    plugin: DescribesPlugin
    controller: DescribesController
    groups: DescribesGroups
    has_condition: bool
    """Whether health is part of a volume's entry (CSI 1.12)."""


class ClusterIdentity(csi_pb2_grpc.IdentityServicer):
    """The Identity service: ready while this controller leads."""

    def __init__(self, plugin: DescribesPlugin, calls: ClusterCalls) -> None:
        self._plugin = plugin
        self._calls = calls

    async def GetPluginInfo(
        self, request: csi_pb2.GetPluginInfoRequest, context: Context
    ) -> PluginInfo:
        """The driver's."""
        return await self._plugin.GetPluginInfo(request, context)

    async def GetPluginCapabilities(
        self, request: csi_pb2.GetPluginCapabilitiesRequest, context: Context
    ) -> PluginCapabilities:
        """The driver's."""
        return await self._plugin.GetPluginCapabilities(request, context)

    async def Probe(self, request: csi_pb2.ProbeRequest, context: Context) -> csi_pb2.ProbeResponse:
        """Whether this controller leads. One that does not is healthy: a liveness probe must not ask this."""
        response = csi_pb2.ProbeResponse()
        response.ready.value = self._calls.leads
        return response


class Central:
    """The parts of one controller."""

    def __init__(
        self,
        store: ControllerSide,
        described: Described,
        *,
        look_every_s: float = LOOK_EVERY_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._store = store
        self.router = Router(store, look_every_s=look_every_s)
        self._names = names = Names(self.router, settle_s=settle_s)
        running = operations.KeyedOperations()
        self._survey = Survey(self.router, names, running)
        self.calls = ClusterCalls(
            self.router,
            names,
            VolumePlacement(self.router, names),
            ClusterLists(self.router, names, has_condition=described.has_condition),
            self._survey,
            running,
        )
        self._identity = ClusterIdentity(described.plugin, self.calls)
        self._controller = ClusterController(
            self.calls, described.controller, has_health=not described.has_condition
        )
        self._groups = ClusterGroupController(self.calls, described.groups)
        self._metadata = ClusterSnapshotMetadata(self.calls)

    def servicers(self) -> tuple[AddServicer, ...]:
        """What adds the services to a server; the Node service is not served."""
        return (
            lambda s: csi_pb2_grpc.add_IdentityServicer_to_server(self._identity, s),
            lambda s: csi_pb2_grpc.add_ControllerServicer_to_server(self._controller, s),
            lambda s: csi_pb2_grpc.add_GroupControllerServicer_to_server(self._groups, s),
            lambda s: csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(self._metadata, s),
        )

    def problem(self) -> errors.CrustError | None:
        """What keeps this controller from its work now: to serve if it leads, else to lead as soon as nobody does.

        That another one leads is no failure: of the replicas of a Deployment all but one wait.
        """
        found = self._store.problem()
        return found or (self._names.problem if self.calls.leads else None)

    @contextlib.asynccontextmanager
    async def leading(self, name: str) -> AsyncIterator[None]:
        """Wait to lead, then serve while the block runs. Once only: what is remembered is of one term."""
        async with self._store.lead(name) as term:
            self._names.begin()
            self.calls.term = term
            surveying = forever(self._survey.keep, "surveys")
            surveys = asyncio.create_task(surveying, name="surveys")
            try:
                yield
            finally:
                surveys.cancel()
                await asyncio.wait([surveys])
                self.calls.term = None

    async def lead(self, name: str) -> None:
        """Wait to lead, then until the term has ended. Raises `LeadershipLost` then."""
        async with self.leading(name):
            term = self.calls.term
            assert term is not None, "it leads"
            await term.lost()
        raise LeadershipLost()
