"""Registers a driver with the kubelet: the socket `<plugins_registry>/<driver>-reg.sock` (pluginregistration v1).

The kubelet finds the socket, calls GetInfo, calls the driver's NodeGetInfo through the proxy, and reports whether it
registered the driver. It calls again after each of its own starts, and by itself after a refusal. When the socket is
removed, the kubelet forgets the driver; so the socket exists exactly as long as the proxy serves the driver.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from crust.core import errors
from crust.rpc.call import Call
from crust.rpc.serving import server
from crust.rpc.serving.daemon import Daemon
from crust.rpc.serving.health import Health
from crust.rpc.serving.service import Service, methods_of
from crust.wire.pluginregistration.v1 import api_pb2

VERSION = "1.0.0"
_SERVICE = api_pb2.DESCRIPTOR.services_by_name["Registration"]


class Registration:
    """The service Registration of one driver."""

    def __init__(self, driver: str, csi_socket: str, health: Health) -> None:
        self._info = api_pb2.PluginInfo(
            type="CSIPlugin", name=driver, endpoint=csi_socket, supported_versions=[VERSION]
        )
        self._health = health
        self.state = "waiting"

    async def GetInfo(self, request: api_pb2.InfoRequest, call: Call) -> api_pb2.PluginInfo:
        """Which driver, and where its CSI socket is."""
        return self._info

    async def NotifyRegistrationStatus(
        self, request: api_pb2.RegistrationStatus, call: Call
    ) -> api_pb2.RegistrationStatusResponse:
        """Whether the kubelet registered it."""
        self.state = "registered" if request.plugin_registered else "refused"
        problem = None
        if not request.plugin_registered:
            problem = errors.NotReady.named(
                "RegistrationRefused",
                f"the kubelet has not registered driver {self._info.name!r}",
                why=request.error[:500] or "it gives no reason",
                hint="check the driver's NodeGetInfo and the kubelet's log; the kubelet tries again by itself",
            )
        self._health.report(f"registration of {self._info.name}", problem, is_fatal=False)
        return api_pb2.RegistrationStatusResponse()


@asynccontextmanager
async def registering(
    registration: Registration, driver: str, registry: str, lock_path: str, daemon: Daemon
) -> AsyncIterator[None]:
    """Be found by the kubelet in the directory `registry` while the block runs."""
    service = Service(
        f"registration {driver}", methods_of(registration, _SERVICE), health=daemon.health
    )
    path = f"{registry}/{driver}-reg.sock"
    async with server.serving(path, service, lock_path=lock_path):
        try:
            yield
        finally:
            daemon.health.report(f"registration of {driver}", None)
