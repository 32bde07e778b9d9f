"""The nodes that the cluster has declared gone: by the taint node.kubernetes.io/out-of-service, set by a person or by
what powers machines off.

The taint says that the machine is off and nothing runs there; Kubernetes detaches and deletes by it without waiting.
It is believed only of a node that is not ready: one whose kubelet reports is alive, whoever tainted it. That a node
is not ready, that its object was deleted and that a volume was detached from it by force prove nothing: each happens
to a machine that only lost its network.
"""

from collections.abc import Mapping
from typing import Any

import lightkube
from lightkube.resources.core_v1 import Node
from lightkube.resources.storage_v1 import CSINode

from crust.kubernetes_api.api import asking

TAINT = "node.kubernetes.io/out-of-service"


class OutOfServiceNodes:
    """Asks the Kubernetes API of one cluster, as the driver `driver`."""

    def __init__(self, client: lightkube.AsyncClient, driver: str) -> None:
        self._client = client
        self._driver = driver

    async def ids(self) -> frozenset[str]:
        """The driver's ids of the nodes that are gone, now. A driver that has left the CSINode object of such a node
        was called by the node's name. Raises `KubernetesApiUnavailable`.
        """
        async with asking("the nodes that are out of service"):
            gone = [_name(each) async for each in self._client.list(Node) if _is_gone(each)]
            if not gone:
                return frozenset()
            known = await self._ids_by_name()
        return frozenset(known.get(name, name) for name in gone)

    async def _ids_by_name(self) -> Mapping[str, str]:
        return {
            _name(each): str(found.nodeID)
            async for each in self._client.list(CSINode)
            for found in each.spec.drivers or ()
            if found.name == self._driver
        }


def is_tainted(node: Any) -> bool:
    """Whether a Node object has the taint."""
    taints = (node.spec.taints if node.spec is not None else None) or ()
    return any(taint.key == TAINT for taint in taints)


def _is_gone(node: Any) -> bool:
    conditions = (node.status.conditions if node.status is not None else None) or ()
    is_ready = any(each.type == "Ready" and each.status == "True" for each in conditions)
    return is_tainted(node) and not is_ready


def _name(found: Any) -> str:
    return str(found.metadata.name)
