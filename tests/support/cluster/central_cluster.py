"""A central controller with simulated nodes, in one process, called as a sidecar calls it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.cluster.central.app import Central, Described
from crust.cluster.protocol import ControllerSide, NodeSide
from crust.rpc.in_process.local import LocalServer
from crust.rpc.serving.health import Health
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.cluster.cluster_contract import WAIT_S, eventually
from tests.support.cluster.memory_cluster import Store
from tests.support.cluster.simulated_pools import GIB, KEY, SimulatedPool, joined

NODES = ("n1", "n2", "n3")

Code = grpc.StatusCode


class Description:
    """Answers what a driver can do: nothing."""

    async def GetPluginInfo(self, request: Any, context: Any) -> Any:
        return csi_pb2.GetPluginInfoResponse(name="block.csi.example.com")

    async def GetPluginCapabilities(self, request: Any, context: Any) -> Any:
        return csi_pb2.GetPluginCapabilitiesResponse()

    async def ControllerGetCapabilities(self, request: Any, context: Any) -> Any:
        return csi_pb2.ControllerGetCapabilitiesResponse()

    async def GroupControllerGetCapabilities(self, request: Any, context: Any) -> Any:
        return csi_pb2.GroupControllerGetCapabilitiesResponse()


DESCRIBED = Described(Description(), Description(), Description(), has_condition=True)


class Sidecar:
    """The stubs of a controller."""

    def __init__(self, central: Central) -> None:
        self.central = central
        server = LocalServer()
        server.open("controller", Health(), admit=central.calls.check)
        for add in central.servicers():
            add(server)
        channel = server.channel()
        self.identity = csi_pb2_grpc.IdentityStub(channel)
        self.controller: Any = csi_pb2_grpc.ControllerStub(channel)
        self.groups: Any = csi_pb2_grpc.GroupControllerStub(channel)
        self.metadata: Any = csi_pb2_grpc.SnapshotMetadataStub(channel)

    async def create(
        self,
        name: str,
        *nodes: str,
        size: int = GIB,
        source: str = "",
        timeout: float | None = None,
    ) -> csi_pb2.Volume:
        """CreateVolume, in the topology of these nodes."""
        request = csi_pb2.CreateVolumeRequest(
            name=name, capacity_range=csi_pb2.CapacityRange(required_bytes=size)
        )
        for node in nodes:
            request.accessibility_requirements.requisite.add().segments[KEY] = node
        if source:
            request.volume_content_source.volume.volume_id = source
        response = await self.controller.CreateVolume(request, timeout=timeout)
        volume: csi_pb2.Volume = response.volume
        return volume

    async def delete(self, volume_id: str) -> None:
        """DeleteVolume."""
        await self.controller.DeleteVolume(csi_pb2.DeleteVolumeRequest(volume_id=volume_id))

    async def listed(self, page: int = 0) -> list[csi_pb2.ListVolumesResponse.Entry]:
        """All pages of ListVolumes."""
        entries, token = [], ""
        while True:
            asked = csi_pb2.ListVolumesRequest(max_entries=page, starting_token=token)
            got = await self.controller.ListVolumes(asked)
            entries += got.entries
            token = got.next_token
            if not token:
                return entries


@asynccontextmanager
async def leading(
    store: ControllerSide, name: str = "controller", look_every_s: float = 0.2
) -> AsyncIterator[Sidecar]:
    """A controller that leads while the block runs, in a store that is in use."""
    central = Central(store, DESCRIBED, look_every_s=look_every_s, settle_s=0)
    async with central.leading(name):
        async with asyncio.timeout(WAIT_S):
            while not await store.placement("settled"):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        yield Sidecar(central)


class SimulatedCluster:
    """A store in memory, nodes, and one controller that leads."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.store = Store()
        self.pools: dict[str, SimulatedPool] = {}
        self._stack = stack

    async def join(self, *node_ids: str, capacity: int = 100 * GIB) -> None:
        """Add nodes."""
        for node_id in node_ids:
            pool = SimulatedPool(node_id, len(self.pools) + 1, capacity)
            self.pools[node_id] = pool
            await self._stack.enter_async_context(joined(pool, self.node(node_id)))
        await eventually(lambda: set(node_ids) <= set(self.store.kept.announcements))

    def node(self, node_id: str) -> NodeSide:
        """A node's side of the store."""
        return self.store.node(node_id)

    async def controller(self) -> Sidecar:
        """A controller that leads."""
        return await self._stack.enter_async_context(leading(self.store.controller()))

    def homes(self, name: str) -> list[str]:
        """The nodes that have a volume of that name."""
        return [
            node_id
            for node_id, pool in self.pools.items()
            if pool.ids.volume_id(name) in pool.volumes
        ]

    async def surveyed(self) -> None:
        """Wait until every pool was surveyed."""
        wanted = {f"surveyed-{pool.pool_id()}" for pool in self.pools.values()}
        await eventually(lambda: wanted <= set(self.store.kept.placements))

    def placements(self) -> dict[str, str]:
        """The records of names."""
        kept = self.store.kept.placements.items()
        return {key: pool for key, pool in kept if not key.startswith(("surveyed-", "settled"))}


@asynccontextmanager
async def simulated(*node_ids: str) -> AsyncIterator[SimulatedCluster]:
    """A cluster of these nodes while the block runs."""
    async with AsyncExitStack() as stack:
        cluster = SimulatedCluster(stack)
        await cluster.join(*node_ids)
        yield cluster


@asynccontextmanager
async def refused(*codes: grpc.StatusCode) -> AsyncIterator[list[grpc.aio.AioRpcError]]:
    """The block ends with one of these codes; the list has the error afterwards."""
    found: list[grpc.aio.AioRpcError] = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        yield found
    found.append(raised.value)
    assert raised.value.code() in codes, raised.value.details()


async def all_of(calls: Sequence[Any]) -> list[Any]:
    """The results, or the errors, of calls at once."""
    return list(await asyncio.gather(*calls, return_exceptions=True))
