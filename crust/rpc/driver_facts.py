"""What a driver says of itself: its name, and whether it defers. Asked once per connection.

A driver behind a socket may be replaced by another version at any time, which shows as a new connection. An answer is
therefore believed for as long as the port has the same connection, and no longer: a driver that was downgraded would
ignore `defer_fs_ops` and mount on the host.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from crust.core import errors, volumes
from crust.rpc.messages import extensions
from crust.rpc.port import Port, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

Fact = TypeVar("Fact")

TIMEOUT_S = 10.0
"""For one question, which needs no storage."""


class PerConnection(Generic[Fact]):
    """An answer, kept for as long as the connection that it came by; a "no" is not kept."""

    def __init__(self, port: Port, ask: Callable[[float | None], Awaitable[Fact]]) -> None:
        self._port = port
        self._ask = ask
        self._known: tuple[int, Fact] | None = None

    async def get(self, timeout_s: float | None = TIMEOUT_S) -> Fact:
        """The answer; raises `PeerStatus`."""
        before = self._port.connection
        if self._known is not None and self._known[0] == before:
            return self._known[1]
        fact = await self._ask(timeout_s)
        # a port that was not connected is by now: by the connection that brought the answer
        connection = before or self._port.connection
        self._known = (connection, fact) if fact and connection else None
        return fact


@dataclass(frozen=True, slots=True)
class NodeCapabilities:
    """What a driver's node advertises to a caller that opts in to deferral."""

    numbers: frozenset[int]

    @property
    def defers(self) -> bool:
        """Whether it defers by itself."""
        return csi_pb2.NodeServiceCapability.RPC.DEFER_FS_OPS in self.numbers

    @property
    def stages(self) -> bool:
        """Whether it has NodeStageVolume."""
        return csi_pb2.NodeServiceCapability.RPC.STAGE_UNSTAGE_VOLUME in self.numbers

    @property
    def expands(self) -> bool:
        """Whether it has NodeExpandVolume."""
        return csi_pb2.NodeServiceCapability.RPC.EXPAND_VOLUME in self.numbers


@dataclass(frozen=True, slots=True)
class PluginCapabilities:
    """What a driver advertises as a plugin."""

    expands: bool
    """Whether its volumes can be expanded at all."""


class DriverFacts:
    """The facts of the driver at the other end of a port."""

    def __init__(self, port: Port) -> None:
        node = stub(csi_pb2_grpc.NodeStub, port)
        identity = stub(csi_pb2_grpc.IdentityStub, port)

        async def capabilities(timeout_s: float | None) -> NodeCapabilities:
            with _naming("NodeGetCapabilities"):
                answer = await node.NodeGetCapabilities(
                    csi_pb2.NodeGetCapabilitiesRequest(),
                    metadata=extensions.METADATA,
                    timeout=timeout_s,
                )
            return node_capabilities(answer)

        async def plugin(timeout_s: float | None) -> PluginCapabilities:
            request = csi_pb2.GetPluginCapabilitiesRequest()
            with _naming("GetPluginCapabilities"):
                answer = await identity.GetPluginCapabilities(request, timeout=timeout_s)
            kinds = {each.volume_expansion.type for each in answer.capabilities}
            return PluginCapabilities(
                bool(kinds - {csi_pb2.PluginCapability.VolumeExpansion.UNKNOWN})
            )

        async def defers(timeout_s: float | None) -> bool:
            return (await capabilities(timeout_s)).defers

        async def name(timeout_s: float | None) -> str:
            request = csi_pb2.GetPluginInfoRequest()
            with _naming("GetPluginInfo"):
                self._last_name = (await identity.GetPluginInfo(request, timeout=timeout_s)).name
            return self._last_name

        self._port = port
        self._last_name = ""
        self._asks: asyncio.Task[None] | None = None
        self._defers = PerConnection(port, defers)
        self._name = PerConnection(port, name)
        self._capabilities = PerConnection(port, capabilities)
        self._plugin = PerConnection(port, plugin)

    def known_name(self) -> str:
        """The driver's name for logs and metrics; empty until it has answered once.

        It is asked only over a connection that is there: to look for one that is not would delay the next call. And
        only by the event loop: a thread's log line wants the name too.
        """
        if self._last_name or not _in_loop():
            return self._last_name
        if self._port.connection and (self._asks is None or self._asks.done()):
            self._asks = asyncio.create_task(self._ask_name(), name="driver name")
        return self._last_name

    async def _ask_name(self) -> None:
        with contextlib.suppress(PeerStatus):  # then it is asked again
            await self.name()

    async def defers(self, timeout_s: float | None = TIMEOUT_S) -> bool:
        """Whether the driver advertises DEFER_FS_OPS; raises `PeerStatus`."""
        return await self._defers.get(timeout_s)

    async def node_capabilities(self, timeout_s: float | None = TIMEOUT_S) -> NodeCapabilities:
        """What it advertised when it was connected; raises `PeerStatus`."""
        return await self._capabilities.get(timeout_s)

    async def plugin_capabilities(self, timeout_s: float | None = TIMEOUT_S) -> PluginCapabilities:
        """What the plugin advertised when it was connected; raises `PeerStatus`."""
        return await self._plugin.get(timeout_s)

    async def name(self, timeout_s: float | None = TIMEOUT_S) -> volumes.DriverName:
        """The driver's own name; raises `PeerStatus`."""
        return volumes.DriverName(await self._name.get(timeout_s))

    async def check_defers(self, timeout_s: float | None = TIMEOUT_S) -> None:
        """Raise `DeferralUnsupported`, or `PeerStatus`, unless the driver defers."""
        if not await self.defers(timeout_s):
            raise errors.Unsupported.named(
                "DeferralUnsupported",
                "the mount cannot be deferred",
                why="the driver does not advertise DEFER_FS_OPS",
                hint=(
                    "use a driver that supports deferral, put a crust shim in front of it, or remove crust.dev/defer "
                    "from the StorageClass"
                ),
            )

    async def check_name(self, configured: str, timeout_s: float | None = TIMEOUT_S) -> None:
        """Raise `DriverNameMismatch`, or `PeerStatus`, unless the driver has the name."""
        reported = await self._name.get(timeout_s)
        if reported != configured:
            raise errors.NotReady.named(
                "DriverNameMismatch",
                f"volumes of driver {configured!r} cannot be deferred",
                why=f"the driver behind that socket calls itself {reported[:63]!r}",
                hint=(
                    "correct name or backend in the proxy's settings: one volume must not have "
                    "two names"
                ),
            )

    async def aclose(self) -> None:
        """Ask no more; before the port is closed."""
        if self._asks is not None:
            self._asks.cancel()
            await asyncio.wait([self._asks])


@contextlib.contextmanager
def _naming(rpc: str) -> Iterator[None]:
    """The caller has sent another call: the driver's status to this one says so. Code and metadata stay."""
    try:
        yield
    except PeerStatus as status:
        if status.text.startswith("["):  # an error of crust names itself first
            raise
        text = f"the driver was asked {rpc} first, and answered: {status.text}"
        raise PeerStatus(status.code, text, status.trailing) from status


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def node_capabilities(answer: csi_pb2.NodeGetCapabilitiesResponse) -> NodeCapabilities:
    """The capabilities of an answer."""
    return NodeCapabilities(frozenset(each.rpc.type for each in answer.capabilities))
