"""Whether a CSIDriver object goes with what the proxy serves. Needs the client of the Kubernetes API."""

import grpc

from crust.core.deferral_keys import Defer
from crust.core.settings.proxy import ServedDriver
from crust.kubernetes_api import csi_driver, csi_driver_objects
from crust.kubernetes_api.api import KubernetesApi
from crust.kubernetes_api.csi_driver import Configuration, Mismatch
from crust.rpc.port import Port, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_ANSWER_S = 5.0
"""For the driver's answer."""
_PUBLISHES = csi_pb2.ControllerServiceCapability.RPC.PUBLISH_UNPUBLISH_VOLUME


async def mismatches(
    client: KubernetesApi, served: ServedDriver, driver: Port
) -> tuple[Mismatch, ...]:
    """What of a driver's CSIDriver object does not go with it. Raises `KubernetesApiUnavailable`."""
    found = await csi_driver_objects.read(client, served.name)
    running = Configuration(
        runtime_class=True,
        default=Defer(served.defer) if served.defer else None,
        attaches=await _attaches(driver),
    )
    return csi_driver.mismatches(found, running)


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
    return any(each.rpc.type == _PUBLISHES for each in answer.capabilities)


async def _says_that_it_attaches(driver: Port) -> bool | None:
    identity = stub(csi_pb2_grpc.IdentityStub, driver)
    try:
        info = await identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=_ANSWER_S)
    except PeerStatus:
        return None
    return {"true": True, "false": False}.get(info.manifest.get(csi_driver.ATTACHES, ""))
