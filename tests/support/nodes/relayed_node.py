"""A node whose parts meet at relays, each of which a test has lie (`tests.support.faults.lying_peers`)."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from crust.blockdriver import serve
from crust.blockdriver.settings import DriverSettings
from crust.csi_shim.settings import ShimSettings
from crust.runtime_handler.registration import Registration
from tests.support.faults.lying_peers import Relay, relayed
from tests.support.faults.refusals import until
from tests.support.nodes.served_node import BlockNode, ServedNode
from tests.support.runtimes import fake_handler


@dataclass
class Relayed(ServedNode):
    """Who asks calls a relay, whose name says who asks and who answers."""

    def __post_init__(self) -> None:
        self.parts = ("relays", *self.parts)
        self.backend = self._met("proxy-shim")
        self.grace_s = 0

    @property
    def relays(self) -> dict[str, Relay]:
        relays: dict[str, Relay] = self.value("relays")
        return relays

    async def restore(self, name: str) -> None:
        """Have the relay tell the truth, over new connections: also over that of the handler's session."""
        session: Registration = self.value("handler")
        ended = session.response
        await self.relays[name].restore()
        while name == "handler-proxy" and session.response is ended:
            await until(session.registered)
            await asyncio.sleep(0.01)

    def _met(self, name: str) -> str:
        return f"{self.places.root}/{name}.sock"

    def part(self, name: str) -> AbstractAsyncContextManager[Any]:
        if name != "relays":
            return super().part(name)
        sockets = self.places.sockets
        real = {
            "proxy-shim": self.places.shim,
            "shim-driver": self.places.driver,
            "shim-proxy": sockets.runtime,
            "driver-proxy": sockets.runtime,
            "proxy-handler": self._met("handler"),
            "handler-proxy": sockets.handlers,
        }
        return relayed({name: (self._met(name), path) for name, path in real.items()})

    def shim_settings(self) -> ShimSettings:
        met = {
            "driver_socket": self._met("shim-driver"),
            "runtime_socket": self._met("shim-proxy"),
        }
        return super().shim_settings().model_copy(update=met)

    def handler(
        self, fake: fake_handler.FakeHandler | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Any]:
        return fake_handler.running(
            fake or fake_handler.FakeHandler(),
            proxy_socket=self._met("handler-proxy"),
            endpoint=self._met("proxy-handler"),
            served_at=self._met("handler"),
            **options,
        )


@dataclass
class RelayedBlockNode(Relayed, BlockNode):
    """With our driver."""

    def driver(self, socket: str) -> AbstractAsyncContextManager[Any]:
        tables = self.tables()["driver"] | {"runtime_socket": self._met("driver-proxy")}
        settings = DriverSettings.model_validate(tables)
        return serve.running(serve.driver_of(settings), socket=socket, run_dir=settings.run_dir)
