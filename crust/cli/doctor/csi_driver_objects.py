"""Whether the CSIDriver objects of the drivers on this node fit the settings, if crust may read the objects.

Kubernetes decides by this object whether a volume is attached before a node has it, and whether a publish names its
pod. Without an object it attaches, and does not name the pod. A mismatch is only reported: an object can be corrected
while nodes serve (attachRequired only by recreating it).
"""

import asyncio
from collections.abc import Iterator

import grpc

from crust.cli.doctor.node import Finding, Mismatches, Node, doctor_check, error, ok, warning
from crust.core import deferral_keys
from crust.core.deferral_keys import Defer
from crust.core.settings import OWN_DRIVER
from crust.kubernetes_api.api import KubernetesApi, client
from crust.kubernetes_api.objects import CSIDriver
from crust.proxy.settings import ProxySettings, ServedDriver
from crust.rpc.port import Port, SocketPort, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_ANSWER_S = 5.0
"""The deadline of a call to the driver."""
_WITHOUT_OBJECT = "the cluster has no CSIDriver object of that name, so it takes its defaults"
_PUBLISHES = csi_pb2.ControllerServiceCapability.RPC.PUBLISH_UNPUBLISH_VOLUME


@doctor_check("csidriver")
def fits_the_settings(node: Node) -> Iterator[Finding]:
    """attachRequired and podInfoOnMount of the CSIDriver objects go with the settings."""
    settings = node.proxy_settings()
    if settings is None or settings.kubernetes is None or node.csi_driver_mismatches is None:
        return
    for name, found in asyncio.run(node.csi_driver_mismatches(settings)).items():
        yield from found or [ok(f"CSIDriver {name} goes with the settings")]


async def mismatches(settings: ProxySettings) -> Mismatches:
    """Ask the Kubernetes API and the drivers. Raises `KubernetesApiUnavailable`."""
    assert settings.kubernetes is not None
    api = client(settings.kubernetes.kubeconfig)
    try:
        found = {}
        for served in settings.drivers:
            async with SocketPort(served.socket) as driver:
                found[served.name] = await of_driver(api, served, driver)
        return found
    finally:
        await api.close()


async def of_driver(api: KubernetesApi, served: ServedDriver, driver: Port) -> list[Finding]:
    """The mismatches of a driver and its CSIDriver object. Raises `KubernetesApiUnavailable`."""
    csi_driver = await api.get(CSIDriver, served.name)
    default = Defer(served.defer) if served.defer else None
    attaches = await _attaches(driver)
    return list(compare(served.name, csi_driver, default=default, attaches=attaches))


def compare(
    name: str, csi_driver: CSIDriver | None, *, default: Defer | None, attaches: bool | None
) -> Iterator[Finding]:
    """The mismatches of a driver's object and the settings; without an object Kubernetes has its defaults.

    A mismatch is an error if volumes do not reach their pods. `default` decides about volumes without a choice.
    `attaches`: whether the driver's controller publishes volumes to nodes; None: it is not known here.
    """
    spec = CSIDriver().spec if csi_driver is None else csi_driver.spec
    cause = f"{_WITHOUT_OBJECT}; " if csi_driver is None else ""
    if not spec.pod_info_on_mount:
        by_default = default is Defer.RUNTIME_CLASS
        calls = "every publish" if by_default else "a publish with crust.dev/defer: runtime-class"
        yield (error if by_default else warning)(
            f"podInfoOnMount of CSIDriver {name} is false",
            f"{cause}a pod's RuntimeClass decides, and {calls} is refused without its name",
            "set spec.podInfoOnMount: true",
        )
    if attaches is False and spec.attach_required is not False:
        yield warning(
            f"attachRequired of CSIDriver {name} is true",
            f"{cause}the driver attaches nothing, and pods wait for an external-attacher",
            "make the object again with spec.attachRequired: false, or run external-attacher",
        )
    # volumes of crust's own driver work without an attach
    if csi_driver and attaches and spec.attach_required is False and name != OWN_DRIVER:
        yield warning(
            f"attachRequired of CSIDriver {name} is false",
            "the driver's controller attaches volumes, and is never asked to (crust's own needs no attach)",
            "unless it is crust's, make the object again with spec.attachRequired: true, for external-attacher",
        )


async def _attaches(driver: Port) -> bool | None:
    """Whether the driver's controller publishes to nodes. If the controller is not at this socket, our own driver
    says it; None for other drivers, and if the driver is away.
    """
    request = csi_pb2.ControllerGetCapabilitiesRequest()
    try:
        answer = await stub(csi_pb2_grpc.ControllerStub, driver).ControllerGetCapabilities(
            request, wait_for_ready=True, timeout=_ANSWER_S
        )
    except PeerStatus as status:
        if status.code is not grpc.StatusCode.UNIMPLEMENTED:
            return None
    else:
        return any(capability.rpc.type == _PUBLISHES for capability in answer.capabilities)
    identity = stub(csi_pb2_grpc.IdentityStub, driver)
    try:
        info = await identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=_ANSWER_S)
    except PeerStatus:
        return None
    return {"true": True, "false": False}.get(info.manifest.get(deferral_keys.ATTACHES, ""))
