"""Whether the CSIDriver objects go with what the proxy serves: logged once after the start, and for `crust doctor`.

A look that fails is a line in the log and no more: the API server may be away while the node serves.
"""

import logging
from collections.abc import Iterable

import grpc

from crust.core import errors
from crust.core.deferral_keys import Defer
from crust.core.settings.proxy import ServedDriver
from crust.kubernetes_api import csi_driver, csi_driver_objects
from crust.kubernetes_api.api import KubernetesApi
from crust.kubernetes_api.csi_driver import Configuration, Mismatch
from crust.rpc.port import Port, stub
from crust.rpc.ports import Ports
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_log = logging.getLogger(__name__)

_ANSWER_S = 60.0
"""For a driver that starts after the proxy."""
_PUBLISHES = csi_pb2.ControllerServiceCapability.RPC.PUBLISH_UNPUBLISH_VOLUME


async def mismatches(
    client: KubernetesApi,
    served: ServedDriver,
    driver: Port,
    *,
    answer_s: float = _ANSWER_S,
) -> tuple[Mismatch, ...]:
    """What of a driver's CSIDriver object does not go with it. Raises `KubernetesApiUnavailable`.

    `answer_s`: how long the driver is waited for.
    """
    found = await csi_driver_objects.read(client, served.name)
    running = Configuration(
        runtime_class=True,
        default=Defer(served.defer) if served.defer else None,
        attaches=await _attaches(driver, answer_s),
    )
    return csi_driver.mismatches(found, running)


async def _attaches(driver: Port, answer_s: float) -> bool | None:
    """Whether its controller publishes to nodes. Where the controller is not at this socket, as the driver says that
    is our own; None of any other, and where it is away.
    """
    request = csi_pb2.ControllerGetCapabilitiesRequest()
    try:
        answer = await stub(csi_pb2_grpc.ControllerStub, driver).ControllerGetCapabilities(
            request, wait_for_ready=True, timeout=answer_s
        )
    except PeerStatus as status:
        is_elsewhere = status.code is grpc.StatusCode.UNIMPLEMENTED
        return await _says_that_it_attaches(driver, answer_s) if is_elsewhere else None
    return any(each.rpc.type == _PUBLISHES for each in answer.capabilities)


async def _says_that_it_attaches(driver: Port, answer_s: float) -> bool | None:
    identity = stub(csi_pb2_grpc.IdentityStub, driver)
    try:
        info = await identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=answer_s)
    except PeerStatus:
        return None
    return {"true": True, "false": False}.get(info.manifest.get(csi_driver.ATTACHES, ""))


async def log_mismatches(
    client: KubernetesApi, served: Iterable[ServedDriver], ports: Ports
) -> None:
    """Look once at the objects of all drivers, and log what does not go with them."""
    for each in served:
        driver = ports.connect(each.backend)
        try:
            for found in await mismatches(client, each, driver):
                extra = {"driver": each.name, "why": found.why, "do": found.todo}
                _log.warning("CSIDriver mismatch: %s", found.what, extra=extra)
        except errors.CrustError as error:
            _log.info("CSIDriver not read", extra={"driver": each.name, "error": error})
        finally:
            await driver.aclose()
