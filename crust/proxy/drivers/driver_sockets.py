"""The drivers that the proxy serves, each with its CSI socket."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from crust.core import errors
from crust.core.settings.proxy import ServedDriver
from crust.proxy.backend import Backend
from crust.proxy.drivers.plugin_registration import Registration, registering
from crust.proxy.service import CsiService
from crust.rpc.port import Port, SocketPort
from crust.rpc.serving import server
from crust.rpc.serving.daemon import Daemon
from crust.rpc.serving.service import Service

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver that the proxy serves. Its `parts` end with it, its socket first."""

    served: ServedDriver
    backend: Backend
    frontend: CsiService
    registration: Registration | None
    parts: AsyncExitStack


Frontend = Callable[[ServedDriver, Backend], CsiService]


class DriverSockets:
    """Serves drivers. `run_dir` has their sockets' locks: CSI allows no other file beside a plugin's socket."""

    def __init__(
        self,
        frontend: Frontend,
        daemon: Daemon,
        *,
        run_dir: str,
        plugins_registry: str,
        connect: Callable[[str], Port] = SocketPort,
    ) -> None:
        self._frontend = frontend
        self._daemon = daemon
        self._run_dir = run_dir
        self._registry = plugins_registry
        self._connect = connect
        self._drivers: dict[str, Driver] = {}

    def all(self) -> Sequence[Driver]:
        """The drivers, by name."""
        return tuple(self._drivers[name] for name in sorted(self._drivers))

    async def add(self, served: ServedDriver) -> None:
        """Serve one more. Raises what keeps its socket from being served, and then nothing is changed."""
        async with AsyncExitStack() as parts:
            backend = Backend(self._connect(served.backend))
            parts.push_async_callback(backend.aclose)
            frontend = self._frontend(served, backend)
            service = Service(
                "csi",
                frontend.methods(),
                others=backend.port,
                health=self._daemon.health,
                driver=lambda: served.name,
            )
            lock_path = self._lock_path(served.socket)
            await parts.enter_async_context(
                server.serving(served.socket, service, lock_path=lock_path)
            )
            registration = await self._register(served, parts)
            self._drivers[served.name] = Driver(
                served, backend, frontend, registration, parts.pop_all()
            )
        _log.info("driver served", extra={"driver": served.name, "socket": served.socket})

    def missing(self) -> errors.CrustError | None:
        """The first driver whose backend is not connected."""
        for driver in self.all():
            if not driver.backend.port.is_connected():
                return errors.PeerUnavailable.named(
                    "BackendNotConnected",
                    f"the driver {driver.served.name!r} cannot be reached",
                    why=f"there is no connection to {driver.served.backend}",
                    hint="start its shim or the driver; `crust status` says more",
                )
        return None

    async def aclose(self) -> None:
        """Stop serving all of them, at once: none takes work while another one's operations end."""
        drivers, self._drivers = self.all(), {}
        await asyncio.gather(*(driver.parts.aclose() for driver in drivers))

    async def _register(self, served: ServedDriver, parts: AsyncExitStack) -> Registration | None:
        if not (self._registry and served.register_plugin):
            return None
        registration = Registration(served.name, served.socket, self._daemon.health)
        lock_path = self._lock_path(f"{self._registry}/{served.name}")
        await parts.enter_async_context(
            registering(registration, served.name, self._registry, lock_path, self._daemon)
        )
        return registration

    def _lock_path(self, socket: str) -> str:
        return f"{self._run_dir}/{hashlib.sha256(socket.encode()).hexdigest()[:16]}.lock"
