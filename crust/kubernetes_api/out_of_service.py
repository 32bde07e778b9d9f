"""The nodes that the cluster has declared gone: by the taint node.kubernetes.io/out-of-service, set by a person or by
what powers machines off.

The taint says that the machine is off and nothing runs there; Kubernetes detaches and deletes by it without waiting.
It is believed only of a node that is not ready: one whose kubelet reports is alive, whoever tainted it. That a node
is not ready, that its object was deleted and that a volume was detached from it by force prove nothing: each happens
to a machine that only lost its network.
"""

from crust.kubernetes_api.api import KubernetesApi
from crust.kubernetes_api.objects import CSINode, Node

TAINT = "node.kubernetes.io/out-of-service"


class OutOfServiceNodes:
    """Asks the Kubernetes API of one cluster, as the driver `driver`."""

    def __init__(self, api: KubernetesApi, driver: str) -> None:
        self._api = api
        self._driver = driver

    async def ids(self) -> frozenset[str]:
        """The driver's ids of the nodes that are gone, now. A driver that has left the CSINode object of such a node
        was called by the node's name. Raises `KubernetesApiUnavailable`.
        """
        nodes, _ = await self._api.listing(Node)
        gone = [node.name for node in nodes if is_out_of_service(node)]
        if not gone:
            return frozenset()
        csi_nodes, _ = await self._api.listing(CSINode)
        ids = {
            csi_node.name: registered.node_id
            for csi_node in csi_nodes
            for registered in csi_node.spec.drivers
            if registered.name == self._driver
        }
        return frozenset(ids.get(name, name) for name in gone)


def is_out_of_service(node: Node) -> bool:
    """Whether the node has the taint, and no kubelet of it reports."""
    is_tainted = any(taint.key == TAINT for taint in node.spec.taints)
    reported = {condition.type: condition.status for condition in node.status.conditions}
    return is_tainted and reported.get("Ready") != "True"
