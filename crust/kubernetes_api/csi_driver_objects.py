"""Reads CSIDriver objects. Nothing of a cluster is changed."""

from crust.kubernetes_api.api import KubernetesApi
from crust.kubernetes_api.csi_driver import CsiDriverObject
from crust.kubernetes_api.objects import CSIDriver


async def read(api: KubernetesApi, name: str) -> CsiDriverObject:
    """A driver's object, or Kubernetes' defaults without one. Raises `KubernetesApiUnavailable`."""
    found = await api.get(CSIDriver, name)
    if found is None:
        return CsiDriverObject(name, exists=False)
    attach, pod_info = found.spec.attach_required, found.spec.pod_info_on_mount
    return CsiDriverObject(
        name,
        exists=True,
        attach_required=True if attach is None else attach,
        pod_info_on_mount=bool(pod_info),
    )
