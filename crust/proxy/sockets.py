"""The drivers that the proxy serves, each with its CSI socket, and with the socket by which a kubelet finds it.

The kubelet finds `<plugins_registry>/<driver>-reg.sock` (pluginregistration v1), calls GetInfo, calls the driver's
NodeGetInfo through the proxy, and reports whether it registered the driver. It calls again after each of its own
starts; after a refusal a kubelet before 1.36 does so only for a new socket, so the proxy makes it anew. It forgets
the driver when the socket is removed; so the socket exists as long as the proxy serves the driver.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from crust.core import errors
from crust.core.pauses import scattered
from crust.core.supervised import Health, supervised
from crust.proxy.service import CsiService
from crust.proxy.settings import ServedDriver
from crust.rpc.call import Call
from crust.rpc.csi_driver import CsiDriver
from crust.rpc.messages import extensions
from crust.rpc.port import Port
from crust.rpc.serving import server
from crust.rpc.serving.daemon import Daemon
from crust.rpc.serving.service import Service, methods_of, probe
from crust.wire.pluginregistration.v1 import api_pb2

_log = logging.getLogger(__name__)

VERSION = "1.0.0"
_AGAIN_S = 10.0
"""The time from a refusal to the next socket, or up to half of it less."""
_REGISTRATION = api_pb2.DESCRIPTOR.services_by_name["Registration"]


class Registration:
    """The service Registration of one driver."""

    def __init__(self, driver: str, csi_socket: str, health: Health) -> None:
        self._info = api_pb2.PluginInfo(
            type="CSIPlugin", name=driver, endpoint=csi_socket, supported_versions=[VERSION]
        )
        self._health = health
        self.state = "waiting"
        self.refused = asyncio.Event()

    async def GetInfo(self, request: api_pb2.InfoRequest, call: Call) -> api_pb2.PluginInfo:
        return self._info

    async def NotifyRegistrationStatus(
        self, request: api_pb2.RegistrationStatus, call: Call
    ) -> api_pb2.RegistrationStatusResponse:
        self.state = "registered" if request.plugin_registered else "refused"
        problem = None
        self.refused.clear()
        if not request.plugin_registered:
            self.refused.set()
            problem = errors.NotReady.named(
                "RegistrationRefused",
                f"the kubelet has not registered driver {self._info.name!r}",
                why=request.error[:500] or "it gives no reason",
                hint=f"check the driver's NodeGetInfo and the kubelet's log; it is asked again within {_AGAIN_S:g} s",
            )
        self._health.report(f"registration of {self._info.name}", problem, is_fatal=False)
        return api_pb2.RegistrationStatusResponse()


@dataclass(frozen=True, slots=True)
class ProxiedDriver:
    """A driver that the proxy serves. Its `parts` end with it, its socket first."""

    served: ServedDriver
    backend: CsiDriver
    frontend: CsiService
    registration: Registration | None
    parts: AsyncExitStack


@dataclass(slots=True)
class DriverSockets:
    """Serves drivers. `run_dir` has their sockets' locks: CSI allows no other file beside a plugin's socket."""

    frontend: Callable[[ServedDriver, CsiDriver], CsiService]
    daemon: Daemon
    run_dir: str
    plugins_registry: str
    connect: Callable[[str], Port]
    _drivers: dict[str, ProxiedDriver] = field(default_factory=dict)

    def all(self) -> Sequence[ProxiedDriver]:
        """The drivers, by name."""
        return tuple(self._drivers[name] for name in sorted(self._drivers))

    async def add(self, served: ServedDriver) -> None:
        """Serve another driver. If its socket cannot be served, raises the reason and changes nothing."""
        async with AsyncExitStack() as parts:
            port = await parts.enter_async_context(self.connect(served.backend))
            backend = CsiDriver(port)
            parts.push_async_callback(backend.aclose)
            frontend = self.frontend(served, backend)
            service = Service(
                "csi",
                frontend.methods(),
                probe(port, extensions.PROXY_VERSION),
                others=port,
                health=self.daemon.health,
                driver=lambda: served.name,
            )
            lock_path = self._lock_path(served.socket)
            await parts.enter_async_context(
                server.serving(served.socket, service, lock_path=lock_path)
            )
            registration = await self._register(served, parts)
            self._drivers[served.name] = ProxiedDriver(
                served, backend, frontend, registration, parts.pop_all()
            )
        _log.info("driver served", extra={"driver": served.name, "socket": served.socket})

    def missing(self) -> errors.CrustError | None:
        """The first driver whose backend is not connected."""
        problems = (
            driver.backend.missing(driver.served.name, driver.served.backend)
            for driver in self.all()
        )
        return next(filter(None, problems), None)

    async def aclose(self) -> None:
        """Stop serving all drivers at once: none takes work while operations of another end."""
        drivers, self._drivers = self.all(), {}
        await asyncio.gather(*(driver.parts.aclose() for driver in drivers))

    async def _register(self, served: ServedDriver, parts: AsyncExitStack) -> Registration | None:
        if not (self.plugins_registry and served.register_plugin):
            return None
        registration = Registration(served.name, served.socket, self.daemon.health)
        service = Service(
            f"registration {served.name}",
            methods_of(registration, _REGISTRATION),
            health=self.daemon.health,
        )
        path = f"{self.plugins_registry}/{served.name}-reg.sock"
        lock_path = self._lock_path(f"{self.plugins_registry}/{served.name}")
        parts.callback(self.daemon.health.report, f"registration of {served.name}", None)
        socket = await parts.enter_async_context(AsyncExitStack())
        await socket.enter_async_context(server.serving(path, service, lock_path=lock_path))

        async def serve_again() -> None:
            while True:
                await registration.refused.wait()
                await asyncio.sleep(scattered(_AGAIN_S))
                if not registration.refused.is_set():
                    continue
                await socket.aclose()
                registration.refused.clear()
                try:
                    await socket.enter_async_context(
                        server.serving(path, service, lock_path=lock_path)
                    )
                except BaseException:
                    registration.refused.set()
                    raise

        again = supervised("registration", serve_again, self.daemon.health, of=served.name)
        await parts.enter_async_context(again)
        return registration

    def _lock_path(self, socket: str) -> str:
        return f"{self.run_dir}/{hashlib.sha256(socket.encode()).hexdigest()[:16]}.lock"
