"""Whether a deferred volume is still in use on the node that it is to be detached from.

Kubernetes detaches by force when an unmount takes more than six minutes: "not safe to detach" then means nothing any
more. A guest that outlives its pod keeps the volume for that long. On the node nobody is asked, and the driver's
controller knows of no guest. But the kubelet reports in Node.status.volumesInUse what it has not unmounted yet.

A node that is gone, or that a person has declared dead (taint node.kubernetes.io/out-of-service), uses nothing.
"""

from collections.abc import Mapping

from crust import deferral_keys
from crust.deferral_keys import Defer
from crust.kubernetes_api import out_of_service
from crust.kubernetes_api.api import KubernetesApi
from crust.kubernetes_api.objects import CSINode, Node, PersistentVolume


class VolumesInUse:
    """Asks the Kubernetes API about the volumes of one cluster.

    `default` decides about a volume that says nothing, as it does on the nodes.
    """

    def __init__(self, client: KubernetesApi, default: Defer) -> None:
        self._client = client
        self._default = default

    async def user_of(self, driver: str, volume_id: str, node_id: str) -> str:
        """The node that reports the deferred volume in use; empty if none does, or the volume is not deferred.

        `node_id` is the driver's id of the node. Raises `KubernetesApiUnavailable`.
        """
        name = await self._name_of(driver, node_id)
        if not name or not await self._reports(name, driver, volume_id):
            return ""
        return name if await self._is_deferred(driver, volume_id) else ""

    async def _name_of(self, driver: str, node_id: str) -> str:
        listing = await self._client.listing(CSINode)
        for each in listing.objects:
            if any((it.name, it.node_id) == (driver, node_id) for it in each.spec.drivers):
                return each.name
        return ""

    async def _reports(self, node_name: str, driver: str, volume_id: str) -> bool:
        node = await self._client.get(Node, node_name)
        if node is None or out_of_service.is_out_of_service(node):
            return False
        return f"kubernetes.io/csi/{driver}^{volume_id}" in node.status.volumes_in_use

    async def _is_deferred(self, driver: str, volume_id: str) -> bool:
        """By any of its objects: several that people made may name one volume, and the node may use each."""
        listing = await self._client.listing(PersistentVolume)
        found = [
            each.spec.csi
            for each in listing.objects
            if each.spec.csi is not None
            and (each.spec.csi.driver, each.spec.csi.volume_handle) == (driver, volume_id)
        ]
        # without an object: migrated from an in-tree plugin, or its object is gone
        attributes = [csi.volume_attributes for csi in found] or [{}]
        return any(map(self._may_defer, attributes))

    def _may_defer(self, attributes: Mapping[str, str]) -> bool:
        wanted = attributes.get(deferral_keys.DEFER, self._default.value)
        return wanted in (Defer.ALWAYS.value, Defer.RUNTIME_CLASS.value)
