"""Connections of nodes and controllers to real members of etcd: `Cluster` of the contract."""

from contextlib import AsyncExitStack

from crust.cluster.etcd import connect
from crust.cluster.etcd.controller_side import EtcdControllerSide
from crust.cluster.etcd.node_side import EtcdNodeSide
from examples.cluster.etcd import Etcd


class EtcdCluster:
    """Each connection has a certificate of its own, and ends with `stack`."""

    def __init__(self, etcd: Etcd, stack: AsyncExitStack) -> None:
        self.etcd = etcd
        self._stack = stack
        self._nodes: dict[str, AsyncExitStack] = {}

    async def node(self, node_id: str) -> EtcdNodeSide:
        """A node's connection; its user has the node's name."""
        if node_id not in self._nodes:
            self._nodes[node_id] = await self._stack.enter_async_context(AsyncExitStack())
        given = self.etcd.settings(node_id)
        return await self._nodes[node_id].enter_async_context(connect.node_side(given, node_id))

    async def leave(self, node_id: str) -> None:
        """End the node's connections."""
        await self._nodes[node_id].aclose()

    async def controller(self, name: str = "c") -> EtcdControllerSide:
        """A controller's connection; all have the same user."""
        given = self.etcd.settings("controller")
        return await self._stack.enter_async_context(connect.controller_side(given))
