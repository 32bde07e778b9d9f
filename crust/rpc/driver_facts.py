"""What a driver says of itself: its name, and whether it defers. Asked once per connection.

A driver behind a socket may be replaced by another version at any time, which shows as a new connection. An answer is
therefore believed for as long as the channel stays READY, and no longer: a driver that was downgraded would ignore
`defer_fs_ops` and mount on the host.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
import grpc.aio

from crust import errors, volumes
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

Fact = TypeVar("Fact")

TIMEOUT_S = 10.0
"""For one question, which needs no storage."""


class DeferralUnsupported(errors.Unsupported):
    """The driver does not support deferral."""

    def __init__(self) -> None:
        super().__init__(
            "the mount cannot be deferred",
            why="the driver does not advertise DEFER_FS_OPS",
            hint="use a driver that supports deferral, put a crust shim in front of it, or remove crust.dev/defer "
            "from the StorageClass",
        )


class PerConnection(Generic[Fact]):
    """An answer, kept for as long as the connection that it came by; a "no" is not kept."""

    def __init__(
        self, channel: grpc.aio.Channel, ask: Callable[[float | None], Awaitable[Fact]]
    ) -> None:
        self._channel = channel
        self._ask = ask
        self._known: asyncio.Task[None] | None = None
        self._fact: Fact | None = None

    async def get(self, timeout_s: float | None = TIMEOUT_S) -> Fact:
        """The answer; raises `grpc.aio.AioRpcError`."""
        ready = grpc.ChannelConnectivity.READY
        if self._known is not None and not self._known.done():
            assert self._fact is not None
            return self._fact
        lasts = self._watch() if self._channel.get_state(try_to_connect=True) is ready else None
        try:
            fact = await self._ask(timeout_s)
        except BaseException:
            if lasts is not None:
                lasts.cancel()
            raise
        # a channel that was not connected is by now: by the connection that brought the answer
        if lasts is None and self._channel.get_state() is ready:
            lasts = self._watch()
        if fact:
            self._known, self._fact = lasts, fact
        elif lasts is not None:
            lasts.cancel()
        return fact

    def _watch(self) -> asyncio.Task[None]:
        """Done when the connection is not the one that it is now."""
        ready = grpc.ChannelConnectivity.READY
        return asyncio.create_task(self._channel.wait_for_state_change(ready), name="driver facts")

    async def aclose(self) -> None:
        """Watch no more."""
        if self._known is not None:
            self._known.cancel()
            await asyncio.wait([self._known])


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
    """The facts of the driver at the other end of a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        node = csi_pb2_grpc.NodeStub(channel)
        identity = csi_pb2_grpc.IdentityStub(channel)

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

        self._channel = channel
        self._last_name = ""
        self._asks: asyncio.Task[None] | None = None
        self._defers = PerConnection(channel, defers)
        self._name = PerConnection(channel, name)
        self._capabilities = PerConnection(channel, capabilities)
        self._plugin = PerConnection(channel, plugin)

    def known_name(self) -> str:
        """The driver's name for logs and metrics; empty until it has answered once.

        It is asked only over a connection that is there: to look for one that is not would delay the next call. And
        only by the event loop: a thread's log line wants the name too.
        """
        if self._last_name or not _in_loop():
            return self._last_name
        is_ready = self._channel.get_state() is grpc.ChannelConnectivity.READY
        if is_ready and (self._asks is None or self._asks.done()):
            self._asks = asyncio.create_task(self._ask_name(), name="driver name")
        return self._last_name

    async def _ask_name(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # then it is asked again
            await self.name()

    async def defers(self, timeout_s: float | None = TIMEOUT_S) -> bool:
        """Whether the driver advertises DEFER_FS_OPS; raises `grpc.aio.AioRpcError`."""
        return await self._defers.get(timeout_s)

    async def node_capabilities(self, timeout_s: float | None = TIMEOUT_S) -> NodeCapabilities:
        """What it advertised when it was connected; raises `grpc.aio.AioRpcError`."""
        return await self._capabilities.get(timeout_s)

    async def plugin_capabilities(self, timeout_s: float | None = TIMEOUT_S) -> PluginCapabilities:
        """What the plugin advertised when it was connected; raises `grpc.aio.AioRpcError`."""
        return await self._plugin.get(timeout_s)

    async def name(self, timeout_s: float | None = TIMEOUT_S) -> volumes.DriverName:
        """The driver's own name; raises `grpc.aio.AioRpcError`."""
        return volumes.DriverName(await self._name.get(timeout_s))

    async def check_defers(self, timeout_s: float | None = TIMEOUT_S) -> None:
        """Raise `DeferralUnsupported`, or `grpc.aio.AioRpcError`, unless the driver defers."""
        if not await self.defers(timeout_s):
            raise DeferralUnsupported()

    async def check_name(self, configured: str, timeout_s: float | None = TIMEOUT_S) -> None:
        """Raise `DriverNameMismatch`, or `grpc.aio.AioRpcError`, unless the driver has the name."""
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
        """Watch the connection no more; before the channel is closed."""
        await self._defers.aclose()
        await self._name.aclose()
        await self._capabilities.aclose()
        await self._plugin.aclose()
        if self._asks is not None:
            self._asks.cancel()
            await asyncio.wait([self._asks])


@contextlib.contextmanager
def _naming(rpc: str) -> Iterator[None]:
    """The caller has sent another call: the driver's status to this one says so. Code and metadata stay."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        if details.startswith("["):  # an error of crust names itself first
            raise
        raise grpc.aio.AioRpcError(
            error.code(),
            error.initial_metadata(),
            error.trailing_metadata(),
            details=f"the driver was asked {rpc} first, and answered: {details}",
        ) from error


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def node_capabilities(answer: csi_pb2.NodeGetCapabilitiesResponse) -> NodeCapabilities:
    """The capabilities of an answer."""
    return NodeCapabilities(frozenset(each.rpc.type for each in answer.capabilities))


def advertises_deferral(answer: csi_pb2.NodeGetCapabilitiesResponse) -> bool:
    """Whether DEFER_FS_OPS is among the capabilities."""
    return node_capabilities(answer).defers
