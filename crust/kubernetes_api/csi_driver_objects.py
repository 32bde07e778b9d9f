"""Reads CSIDriver objects. Nothing of a cluster is changed."""

import lightkube
from lightkube.resources.storage_v1 import CSIDriver

from crust.kubernetes_api.api import asking
from crust.kubernetes_api.csi_driver import CsiDriverObject

_NOT_FOUND = 404


async def read(client: lightkube.AsyncClient, name: str) -> CsiDriverObject:
    """A driver's object, or Kubernetes' defaults without one. Raises `KubernetesApiUnavailable`."""
    async with asking(f"CSIDriver {name}"):
        try:
            found = await client.get(CSIDriver, name)
        except lightkube.ApiError as error:
            if error.status.code == _NOT_FOUND:
                return CsiDriverObject(name, exists=False)
            raise
    attach, pod_info = found.spec.attachRequired, found.spec.podInfoOnMount
    return CsiDriverObject(
        name,
        exists=True,
        attach_required=True if attach is None else attach,
        pod_info_on_mount=bool(pod_info),
    )
