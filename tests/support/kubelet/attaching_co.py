"""A CO that attaches, and learns of a node from the plugin's controller: external-attacher's flow in CSI PR #603.

A kubelet's part registers the node by its id. The controller's part learns topology and limit, and attaches nothing
to the node until it has (specs/node-identity.md). It learns again when an attach is refused with RESOURCE_EXHAUSTED,
and at the ticks of a clock that the test has. A volume for which the node has no slot stays pending.

Its own list is of attachments that exist, finished or not: one that is on its way must not look foreign.
"""

import asyncio
import enum
from dataclasses import dataclass, field

import grpc
import grpc.aio

from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.co import Co
from tests.support.faults.refusals import repeated

KNOWS_NODE_INFO = ((extensions.KEY, extensions.NODE_INFO),)
_TIMEOUT_S = 60.0
_RPC = csi_pb2.NodeServiceCapability.RPC


class Shape(enum.Enum):
    """The three forms that the proposal took."""

    IDS_IN_REQUEST = "first"
    IDS_IN_RESPONSE = "second"
    FLAG = "third"


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """What a controller said of a node."""

    topology: dict[str, str]
    limit: int
    """How many of the CO's own volumes the node takes."""
    foreign: frozenset[str]
    """Volumes with a slot that the CO does not know."""


@dataclass
class AttachingCo:
    """One node and its attachments. `node` and `controller` are the sockets of the plugin's two parts."""

    shape: Shape
    node: grpc.aio.Channel
    controller: grpc.aio.Channel
    node_id: str = ""
    learned: list[NodeAnswer] = field(default_factory=list)
    attachments: set[str] = field(default_factory=set)
    attached: set[str] = field(default_factory=set)
    pending: list[str] = field(default_factory=list)
    exhausted: int = 0
    """How many attaches were refused with RESOURCE_EXHAUSTED."""
    _may_attach: asyncio.Event = field(default_factory=asyncio.Event)

    async def register(self) -> None:
        """The kubelet's part: the id, by the RPC of the shape; topology and limit of that answer are not used."""
        stub, opt_in = csi_pb2_grpc.NodeStub(self.node), KNOWS_NODE_INFO
        answer = await self._capabilities(stub)
        known = {capability.rpc.type for capability in answer.capabilities}
        if self.shape is Shape.FLAG:
            assert _RPC.NODE_INFO_FROM_CONTROLLER in known
            request = csi_pb2.NodeGetInfoRequest(controller_get_node_info=True)
            info = await stub.NodeGetInfo(request, metadata=opt_in, timeout=_TIMEOUT_S)
            self.node_id = info.node_id
        else:
            assert _RPC.GET_ID in known
            asked = csi_pb2.NodeGetIDRequest()
            by_id = await stub.NodeGetID(asked, metadata=opt_in, timeout=_TIMEOUT_S)
            self.node_id = by_id.node_id

    async def _capabilities(
        self, stub: "csi_pb2_grpc.NodeAsyncStub"
    ) -> csi_pb2.NodeGetCapabilitiesResponse:
        """Retry, as a kubelet does, until the plugin and what is behind it have started."""
        request = csi_pb2.NodeGetCapabilitiesRequest()
        return await repeated(
            lambda: stub.NodeGetCapabilities(
                request, metadata=KNOWS_NODE_INFO, wait_for_ready=True, timeout=_TIMEOUT_S
            ),
            grpc.StatusCode.UNAVAILABLE,
        )

    async def learn(self) -> NodeAnswer:
        """The controller's part; attaching is paused meanwhile, and stays so if it fails."""
        self._may_attach.clear()
        request = csi_pb2.ControllerGetNodeInfoRequest(node_id=self.node_id)
        own = frozenset(self.attachments)  # before the question: what finishes meanwhile is in it
        if self.shape is Shape.IDS_IN_REQUEST:
            request.published_volume_ids.extend(sorted(own))
        stub = csi_pb2_grpc.ControllerStub(self.controller)
        answer = await stub.ControllerGetNodeInfo(
            request, metadata=KNOWS_NODE_INFO, timeout=_TIMEOUT_S
        )
        foreign = frozenset(answer.published_volume_ids) - own - self.attachments
        counted = len(foreign) if self.shape is not Shape.IDS_IN_REQUEST else 0
        assert answer.max_volumes_per_node > 0, "this driver has a limit"
        found = NodeAnswer(
            topology=dict(answer.accessible_topology.segments),
            limit=max(answer.max_volumes_per_node - counted, 0),
            foreign=foreign,
        )
        self.learned.append(found)
        self._may_attach.set()
        return found

    async def follow(self, ticks: "asyncio.Queue[None]") -> None:
        """Learn at each tick, until cancelled."""
        while True:
            await ticks.get()
            await self.learn()
            ticks.task_done()

    async def attach(self, volume_id: str, capability: csi_pb2.VolumeCapability) -> bool:
        """Attach if a slot is free; else the volume is pending, and nobody is asked."""
        await self._may_attach.wait()
        if len(self.attachments) >= self.learned[-1].limit:
            self.pending.append(volume_id)
            return False
        self.attachments.add(volume_id)
        try:
            await Co(self.controller).attach(volume_id, self.node_id, capability)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            self.exhausted += 1
            self.attachments.discard(volume_id)
            self.pending.append(volume_id)
            await self.learn()
            return False
        self.attached.add(volume_id)
        return True

    async def detach(self, volume_id: str) -> None:
        """Detach, and attach nothing in its place."""
        await Co(self.controller).detach(volume_id, self.node_id)
        self.attachments.discard(volume_id)
        self.attached.discard(volume_id)
