"""The CSIDriver objects of the drivers on this node, where crust may read them. Nothing of a cluster is changed.

The client of the Kubernetes API is optional, so it is imported by the function that asks.
"""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc

from crust.cli.doctor.finding import Finding, doctor_check, error, ok, warning
from crust.cli.doctor.node import Mismatches, Node
from crust.core.deferral_keys import Defer
from crust.core.settings.loading import InvalidSettings
from crust.core.settings.proxy import KubernetesSettings, ProxySettings, ServedDriver
from crust.kubernetes_api import csi_driver
from crust.kubernetes_api.csi_driver import Configuration, CsiDriverObject, Mismatch
from crust.rpc.port import Port, SocketPort, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

if TYPE_CHECKING:
    from crust.kubernetes_api.api import KubernetesApi

_ANSWER_S = 5.0
"""For the driver's answer."""
_PUBLISHES = csi_pb2.ControllerServiceCapability.RPC.PUBLISH_UNPUBLISH_VOLUME


@doctor_check("csidriver")
def fits_the_settings(node: Node) -> Iterator[Finding]:
    """attachRequired and podInfoOnMount of the CSIDriver objects go with the settings."""
    found = node.proxy_settings()
    if found is None or found.kubernetes is None or node.csi_driver_mismatches is None:
        return
    for name, mismatches in node.csi_driver_mismatches(found).items():
        for mismatch in mismatches:
            yield (error if mismatch.is_fatal else warning)(
                mismatch.what, mismatch.why, mismatch.todo
            )
        if not mismatches:
            yield ok(f"CSIDriver {name} goes with the settings")


def mismatches(settings: ProxySettings) -> Mismatches:
    """Ask the Kubernetes API and the drivers. Raises `KubernetesApiUnavailable`. Blocks."""
    assert settings.kubernetes is not None
    return asyncio.run(_mismatches(settings, settings.kubernetes))


async def _mismatches(settings: ProxySettings, kubernetes: KubernetesSettings) -> Mismatches:
    try:
        from crust.kubernetes_api import api
    except ImportError as missing:
        raise InvalidSettings(
            "proxy", "kubernetes is set, and its client is missing: install crust-csi[kubernetes]"
        ) from missing
    client = api.client(kubernetes.kubeconfig)
    try:
        found = {}
        for served in settings.drivers:
            async with SocketPort(served.socket) as driver:
                found[served.name] = await of_driver(client, served, driver)
        return found
    finally:
        await client.close()


async def of_driver(
    client: "KubernetesApi", served: ServedDriver, driver: Port
) -> tuple[Mismatch, ...]:
    """What of a driver's CSIDriver object does not go with it. Raises `KubernetesApiUnavailable`."""
    found = await read(client, served.name)
    running = Configuration(
        runtime_class=True,
        default=Defer(served.defer) if served.defer else None,
        attaches=await _attaches(driver),
    )
    return csi_driver.mismatches(found, running)


async def read(api: "KubernetesApi", name: str) -> CsiDriverObject:
    """A driver's object, or Kubernetes' defaults without one. Raises `KubernetesApiUnavailable`."""
    from crust.kubernetes_api.objects import CSIDriver

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
    return {"true": True, "false": False}.get(info.manifest.get(csi_driver.ATTACHES, ""))
