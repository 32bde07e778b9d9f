"""Whether a deferred volume is still in use on the node that it is to be detached from.

Kubernetes detaches by force when an unmount takes more than six minutes: "not safe to detach" then means nothing any
more. A guest that outlives its pod keeps the volume for that long. On the node nobody is asked, and the driver's
controller knows of no guest. But the kubelet reports in Node.status.volumesInUse what it has not unmounted yet.

A node that is gone, or that a person has declared dead (taint node.kubernetes.io/out-of-service), uses nothing.
"""

from collections.abc import Mapping
from typing import Any

import lightkube
from lightkube.resources.core_v1 import Node, PersistentVolume
from lightkube.resources.storage_v1 import CSINode

from crust import deferral_keys
from crust.deferral_keys import Defer
from crust.kubernetes_api import out_of_service
from crust.kubernetes_api.api import asking

_NOT_FOUND = 404


class VolumesInUse:
    """Asks the Kubernetes API about the volumes of one cluster.

    `default` decides about a volume that says nothing, as it does on the nodes.
    """

    def __init__(self, client: lightkube.AsyncClient, default: Defer) -> None:
        self._client = client
        self._default = default

    async def user_of(self, driver: str, volume_id: str, node_id: str) -> str:
        """The node that reports the deferred volume in use; empty if none does, or the volume is not deferred.

        `node_id` is the driver's id of the node. Raises `KubernetesApiUnavailable`.
        """
        async with asking(f"the use of volume {volume_id[:128]}"):
            name = await self._name_of(driver, node_id)
            if not name or not await self._reports(name, driver, volume_id):
                return ""
            return name if await self._is_deferred(driver, volume_id) else ""

    async def _name_of(self, driver: str, node_id: str) -> str:
        async for each in self._client.list(CSINode):
            drivers = each.spec.drivers or ()
            if any(found.name == driver and found.nodeID == node_id for found in drivers):
                return _name(each)
        return ""

    async def _reports(self, node_name: str, driver: str, volume_id: str) -> bool:
        try:
            node = await self._client.get(Node, node_name)
        except lightkube.ApiError as error:
            if error.status.code == _NOT_FOUND:
                return False
            raise
        if out_of_service.is_tainted(node):
            return False
        in_use = (node.status.volumesInUse if node.status is not None else None) or ()
        return f"kubernetes.io/csi/{driver}^{volume_id}" in in_use

    async def _is_deferred(self, driver: str, volume_id: str) -> bool:
        """By any of its objects: several that people made may name one volume, and the node may use each."""
        found = False
        async for each in self._client.list(PersistentVolume):
            csi = each.spec.csi if each.spec is not None else None
            if csi is not None and (csi.driver, csi.volumeHandle) == (driver, volume_id):
                found = True
                if self._may_defer(csi.volumeAttributes or {}):
                    return True
        # without an object: migrated from an in-tree plugin, or its object is gone
        return not found and self._may_defer({})

    def _may_defer(self, attributes: Mapping[str, str]) -> bool:
        wanted = attributes.get(deferral_keys.DEFER, self._default.value)
        return wanted in (Defer.ALWAYS.value, Defer.RUNTIME_CLASS.value)


def _name(found: Any) -> str:
    return str(found.metadata.name)
