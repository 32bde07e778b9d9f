"""How Kubernetes provisions local volumes on many nodes: its scheduler, and an external-provisioner on each node.

    each node's external-provisioner   publishes the capacity of the node's segment, as a CSIStorageCapacity object
    the scheduler                      selects a node for the pod of a PVC: one whose capacity is enough
    each node's external-provisioner   sees all PVCs, and creates those alone whose selected node is its own, in the
                                       topology of that node (--node-deployment, --strict-topology); when the pool
                                       turns out to be full, it takes the selection back

The API server is the memory of this process. Nothing here speaks with another node's driver.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
import grpc.aio

from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.kubelet import Kubelet


@dataclass(frozen=True, slots=True)
class StorageCapacity:
    """The content of a CSIStorageCapacity object, for one node."""

    topology: Mapping[str, str]
    capacity_bytes: int
    maximum_volume_bytes: int


@dataclass(slots=True)
class Claim:
    """A PersistentVolumeClaim of a class with WaitForFirstConsumer."""

    name: str
    size_bytes: int
    selected_node: str = ""
    volume: csi_pb2.Volume | None = None


@dataclass(slots=True)
class ApiServer:
    """The objects that scheduler and provisioners share."""

    capacities: dict[str, StorageCapacity] = field(default_factory=dict)
    """By node."""

    def schedule(self, claim: Claim, wanted_node: str = "") -> bool:
        """Select a node for the claim's pod, or none: the wanted one (the pod's nodeSelector), else the one with the
        most capacity. The pod stays pending where no node is large enough.
        """
        fits = {
            node: capacity.capacity_bytes
            for node, capacity in self.capacities.items()
            if node == (wanted_node or node)
            and claim.size_bytes <= min(capacity.capacity_bytes, capacity.maximum_volume_bytes)
        }
        claim.selected_node = max(fits, key=lambda node: fits[node], default="")
        return bool(fits)


class Provisioner:
    """external-provisioner --node-deployment beside the driver of one node."""

    def __init__(self, node: str, kubelet: Kubelet, api: ApiServer) -> None:
        """`kubelet` has the socket of the node's driver, and calls no other driver."""
        self._node = node
        self._kubelet = kubelet
        self._api = api

    async def publish_capacity(self) -> StorageCapacity:
        """Write the CSIStorageCapacity object of this node."""
        topology = await self._kubelet.topology()
        capacity = StorageCapacity(topology, *await self._kubelet.capacity(topology))
        self._api.capacities[self._node] = capacity
        return capacity

    async def sync(self, claim: Claim) -> None:
        """Create the claim's volume if its selected node is this one. A full pool gives the selection back."""
        if claim.selected_node != self._node or claim.volume is not None:
            return
        topology = self._api.capacities[self._node].topology
        try:
            claim.volume = await self._kubelet.create(
                claim.name, claim.size_bytes, topology=topology
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            claim.selected_node = ""
