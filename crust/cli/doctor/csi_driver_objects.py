"""The CSIDriver objects of the drivers on this node, where crust may read them, and whether its settings go with
them.

Kubernetes decides by this object whether a volume is attached before a node has it, and whether a publish names its
pod. Without an object it attaches, and does not name the pod. A mismatch stops nothing, and nothing of a cluster is
changed: an object can be corrected while nodes serve (attachRequired only by recreating it).
"""

import asyncio
from collections.abc import Iterator

import grpc

from crust.cli.doctor.finding import Finding, doctor_check, error, ok, warning
from crust.cli.doctor.node import Mismatches, Node
from crust.core import deferral_keys
from crust.core.deferral_keys import Defer
from crust.core.settings.proxy import KubernetesSettings, ProxySettings, ServedDriver
from crust.kubernetes_api.api import KubernetesApi, client
from crust.kubernetes_api.objects import CSIDriver
from crust.rpc.port import Port, SocketPort, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_ANSWER_S = 5.0
"""For the driver's answer."""
_OWN_DRIVER = "block.csi.crust.dev"
_WITHOUT_OBJECT = "the cluster has no CSIDriver object of that name, so it takes its defaults"
_PUBLISHES = csi_pb2.ControllerServiceCapability.RPC.PUBLISH_UNPUBLISH_VOLUME


@doctor_check("csidriver")
def fits_the_settings(node: Node) -> Iterator[Finding]:
    """attachRequired and podInfoOnMount of the CSIDriver objects go with the settings."""
    found = node.proxy_settings()
    if found is None or found.kubernetes is None or node.csi_driver_mismatches is None:
        return
    for name, mismatches in node.csi_driver_mismatches(found).items():
        yield from mismatches or [ok(f"CSIDriver {name} goes with the settings")]


def mismatches(settings: ProxySettings) -> Mismatches:
    """Ask the Kubernetes API and the drivers. Raises `KubernetesApiUnavailable`. Blocks."""
    assert settings.kubernetes is not None
    return asyncio.run(_mismatches(settings, settings.kubernetes))


async def _mismatches(settings: ProxySettings, kubernetes: KubernetesSettings) -> Mismatches:
    api = client(kubernetes.kubeconfig)
    try:
        found = {}
        for served in settings.drivers:
            async with SocketPort(served.socket) as driver:
                found[served.name] = await of_driver(api, served, driver)
        return found
    finally:
        await api.close()


async def of_driver(api: KubernetesApi, served: ServedDriver, driver: Port) -> list[Finding]:
    """What of a driver's CSIDriver object does not go with it. Raises `KubernetesApiUnavailable`."""
    found = await api.get(CSIDriver, served.name)
    default = Defer(served.defer) if served.defer else None
    return compare(served.name, found, default=default, attaches=await _attaches(driver))


def compare(
    name: str, found: CSIDriver | None, *, default: Defer | None, attaches: bool | None
) -> list[Finding]:
    """What of a driver's object does not go with the settings; without one Kubernetes has its defaults.

    An error: volumes do not get to their pods. `default` decides about volumes that say nothing. `attaches`: whether
    the driver's controller publishes volumes to nodes; None: it is not known here.
    """
    spec = CSIDriver().spec if found is None else found.spec
    cause = f"{_WITHOUT_OBJECT}; " if found is None else ""
    mismatches: list[Finding] = []
    if not spec.pod_info_on_mount:
        by_default = default is Defer.RUNTIME_CLASS
        which = "every publish" if by_default else "a publish with crust.dev/defer: runtime-class"
        pod_info = (error if by_default else warning)(
            f"podInfoOnMount of CSIDriver {name} is false",
            f"{cause}a pod's RuntimeClass decides, and {which} is refused without its name",
            "set spec.podInfoOnMount: true",
        )
        mismatches.append(pod_info)
    if attaches is False and spec.attach_required is not False:
        attaches_in_vain = warning(
            f"attachRequired of CSIDriver {name} is true",
            f"{cause}the driver attaches nothing, and pods wait for an external-attacher",
            "make the object again with spec.attachRequired: false, or run external-attacher",
        )
        mismatches.append(attaches_in_vain)
    # volumes of crust's own driver need no attach, and are not refused without
    if found and attaches and spec.attach_required is False and name != _OWN_DRIVER:
        never_attaches = warning(
            f"attachRequired of CSIDriver {name} is false",
            "the driver's controller attaches volumes, and is never asked to (crust's own needs no attach)",
            "unless it is crust's, make the object again with spec.attachRequired: true, for external-attacher",
        )
        mismatches.append(never_attaches)
    return mismatches


async def _attaches(driver: Port) -> bool | None:
    """Whether its controller publishes to nodes. Where the controller is not at this socket, as the driver says that
    is our own; None of any other, and where it is away.
    """
    request = csi_pb2.ControllerGetCapabilitiesRequest()
    try:
        answer = await stub(csi_pb2_grpc.ControllerStub, driver).ControllerGetCapabilities(
            request, wait_for_ready=True, timeout=_ANSWER_S
        )
    except PeerStatus as status:
        is_elsewhere = status.code is grpc.StatusCode.UNIMPLEMENTED
        return await _says_that_it_attaches(driver) if is_elsewhere else None
    return any(capability.rpc.type == _PUBLISHES for capability in answer.capabilities)


async def _says_that_it_attaches(driver: Port) -> bool | None:
    identity = stub(csi_pb2_grpc.IdentityStub, driver)
    try:
        info = await identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=_ANSWER_S)
    except PeerStatus:
        return None
    return {"true": True, "false": False}.get(info.manifest.get(deferral_keys.ATTACHES, ""))
