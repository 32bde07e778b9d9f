"""The driver as a node of a cluster with one controller: its pool announced, its controller part reached from there.

The controller's calls go to the same servicers as a call on the socket, in this process. So they meet the same locks,
and the records of the pool are what makes them idempotent. They are served while the pool is.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from crust import errors
from crust.blockdriver.controller import topology
from crust.blockdriver.driver import Driver
from crust.cluster.agent import Agent
from crust.cluster.forever import forever
from crust.cluster.protocol import Announcement, NodeSide
from crust.rpc.in_process.local import LocalServer
from crust.rpc.serving.health import Health
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_LOOK_S = 10.0

_log = logging.getLogger(__name__)


class DriverPool:
    """The driver's pool as the agent announces it: the numbers that the driver itself answers with."""

    def __init__(self, driver: Driver, node_id: str, channel: grpc.aio.Channel) -> None:
        self._pool = driver.stores.pool
        self._node_id = node_id
        self._controller: Any = csi_pb2_grpc.ControllerStub(channel)
        self._boot = secrets.token_hex(8)

    def pool_id(self) -> str:
        """Empty while none was opened."""
        try:
            return self._pool.ids.pool_id
        except errors.PeerUnavailable:
            return ""

    async def announcement(self) -> Announcement | None:
        """None while no pool was opened; a pool that went away is announced as not ready."""
        pool_id = self.pool_id()
        if not pool_id:
            return None
        free, most, slots = 0, 0, csi_pb2.ControllerGetNodeInfoResponse()
        is_ready = self._pool.is_served
        try:
            if is_ready:
                capacity = await self._controller.GetCapacity(
                    csi_pb2.GetCapacityRequest(), timeout=_LOOK_S
                )
                free, most = capacity.available_capacity, capacity.maximum_volume_size.value
                asked = csi_pb2.ControllerGetNodeInfoRequest(node_id=self._node_id)
                slots = await self._controller.ControllerGetNodeInfo(asked, timeout=_LOOK_S)
        except grpc.aio.AioRpcError as error:
            _log.warning("the pool cannot be measured", extra={"error": error.details()})
            free = most = 0
        return Announcement(
            node_id=self._node_id,
            pool_id=pool_id,
            segments={topology.KEY: topology.value_of(self._node_id)},
            capacity_bytes=free,
            maximum_bytes=most,
            volumes=len(slots.published_volume_ids),
            max_volumes=slots.max_volumes_per_node,
            is_ready=is_ready,
            boot=f"{self._boot}.{self._pool.times_served}",
        )


@asynccontextmanager
async def joined(
    driver: Driver, store: NodeSide, node_id: str, health: Health
) -> AsyncIterator[None]:
    """The driver's pool in the cluster of `store` while the block runs."""
    server: Any = LocalServer()
    server.open(
        "cluster",
        health,
        admit=lambda method: driver.stores.pool.check_served(),
        driver=lambda: driver.name,
    )
    csi_pb2_grpc.add_ControllerServicer_to_server(driver.controller, server)
    csi_pb2_grpc.add_GroupControllerServicer_to_server(driver.group_controller, server)
    csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(driver.snapshot_metadata, server)
    agent = Agent(store, server, DriverPool(driver, node_id, server.channel()))
    with driver.workers.used():
        task = asyncio.create_task(forever(agent.run, "agent"), name="agent of the cluster")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        server.close()
