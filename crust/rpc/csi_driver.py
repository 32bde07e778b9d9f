"""The CSI driver, or the shim in front of it, at the other end of a port: its calls, and what it says of itself.

A driver behind a socket may be replaced by another version at any time, which shows as a new connection. What it says
of itself is therefore believed for as long as the port has the same connection, and no longer: a driver that was
downgraded would ignore `defer_fs_ops` and mount on the host. A status of the driver is raised unchanged
(`PeerStatus`).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from crust.core import errors, volumes
from crust.rpc.call import Call, Metadata
from crust.rpc.messages import extensions
from crust.rpc.port import Port, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

CHANGE_TIMEOUT_S = 110.0
"""For a call that changes something, of an operation that outlives its caller: below a kubelet's two minutes."""

QUESTION_TIMEOUT_S = 10.0
"""For one question about the driver, which needs no storage."""

Answer = TypeVar("Answer")
Fact = TypeVar("Fact")
_RPC = csi_pb2.NodeServiceCapability.RPC


@dataclass(frozen=True, slots=True)
class NodeCapabilities:
    """What a driver's node advertises to a caller that opts in to deferral.

    Their numbers; and whether it defers by itself, and has NodeStageVolume and NodeExpandVolume.
    """

    numbers: frozenset[int]
    defers: bool
    stages: bool
    expands: bool

    @classmethod
    def of(cls, answer: csi_pb2.NodeGetCapabilitiesResponse) -> "NodeCapabilities":
        """The capabilities of an answer."""
        numbers = frozenset(capability.rpc.type for capability in answer.capabilities)
        return cls(
            numbers,
            defers=_RPC.DEFER_FS_OPS in numbers,
            stages=_RPC.STAGE_UNSTAGE_VOLUME in numbers,
            expands=_RPC.EXPAND_VOLUME in numbers,
        )


class CsiDriver:
    """The driver at the other end of `port`, which the caller closes after this. `node` is its Node service."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.node = stub(csi_pb2_grpc.NodeStub, port)
        self._identity = stub(csi_pb2_grpc.IdentityStub, port)
        self._facts: dict[str, tuple[int, Any]] = {}
        """The connection by which an answer came, and what it said, by RPC."""
        self._last_name = ""
        self._asks: asyncio.Task[None] | None = None

    def known_name(self) -> str:
        """The driver's name for logs and metrics; empty until it has answered once.

        It is asked only over a connection that is there: to look for one that is not would delay the next call. And
        only by the event loop: a thread's log line wants the name too.
        """
        if self._last_name or not _in_loop():
            return self._last_name
        if self.port.connection and (self._asks is None or self._asks.done()):
            self._asks = asyncio.create_task(self._ask_name(), name="driver name")
        return self._last_name

    async def _ask_name(self) -> None:
        with contextlib.suppress(PeerStatus):  # then it is asked again
            await self.name()

    async def name(self, timeout_s: float | None = QUESTION_TIMEOUT_S) -> volumes.DriverName:
        """The driver's own name; raises `PeerStatus`."""
        known: volumes.DriverName | None = self._known("GetPluginInfo")
        if known is None:
            asked = self._identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=timeout_s)
            known = await self._learn(
                "GetPluginInfo", asked, lambda answer: volumes.DriverName(answer.name)
            )
            self._last_name = known
        return known

    async def node_capabilities(
        self, timeout_s: float | None = QUESTION_TIMEOUT_S
    ) -> NodeCapabilities:
        """What it advertised when it was connected; raises `PeerStatus`."""
        return self._known("NodeGetCapabilities") or await self._ask_capabilities(timeout_s)

    async def _ask_capabilities(self, timeout_s: float | None) -> NodeCapabilities:
        request, metadata = csi_pb2.NodeGetCapabilitiesRequest(), extensions.METADATA
        asked = self.node.NodeGetCapabilities(request, metadata=metadata, timeout=timeout_s)
        return await self._learn("NodeGetCapabilities", asked, NodeCapabilities.of)

    async def expands_volumes(self, timeout_s: float | None = QUESTION_TIMEOUT_S) -> bool:
        """Whether its volumes can be expanded at all, as it said when it was connected; raises `PeerStatus`."""
        known: bool | None = self._known("GetPluginCapabilities")
        if known is None:
            request = csi_pb2.GetPluginCapabilitiesRequest()
            asked = self._identity.GetPluginCapabilities(request, timeout=timeout_s)
            known = await self._learn("GetPluginCapabilities", asked, _expands_volumes)
        return known

    async def defers(self, timeout_s: float | None = QUESTION_TIMEOUT_S) -> bool:
        """Whether it advertises DEFER_FS_OPS; raises `PeerStatus`.

        A "no" is not kept: behind a shim, the driver may be replaced without a new connection.
        """
        known: NodeCapabilities | None = self._known("NodeGetCapabilities")
        if known is None or not known.defers:
            known = await self._ask_capabilities(timeout_s)
        return known.defers

    async def check_defers(self, timeout_s: float | None = QUESTION_TIMEOUT_S) -> None:
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

    async def check_name(self, configured: str) -> None:
        """Raise `DriverNameMismatch`, or `PeerStatus`, unless the driver has the name."""
        reported = await self.name()
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

    def missing(self, name: str, socket_path: str) -> errors.CrustError | None:
        """The error if there is no connection; then the port begins to connect."""
        if self.port.is_connected():
            return None
        return errors.PeerUnavailable.named(
            "DriverNotConnected",
            f"the driver {name or 'of this shim'} cannot be reached",
            why=f"there is no connection to {socket_path}",
            hint="start the driver, and the shim in front of it; `crust status` says more",
        )

    async def aclose(self) -> None:
        """Ask no more; before the port is closed."""
        if self._asks is not None:
            self._asks.cancel()
            await asyncio.wait([self._asks])

    def _known(self, rpc: str) -> Any:
        """What the driver has said over the connection that exists now; None if it was not asked."""
        connection, fact = self._facts.get(rpc, (0, None))
        return fact if connection and connection == self.port.connection else None

    async def _learn(
        self, rpc: str, asked: Awaitable[Answer], read: Callable[[Answer], Fact]
    ) -> Fact:
        """Keep what the answer says. The caller has sent another call: a driver's status to this one says so."""
        before = self.port.connection
        try:
            fact = read(await asked)
        except PeerStatus as status:
            if status.text.startswith("["):  # an error of crust names itself first
                raise
            text = f"the driver was asked {rpc} first, and answered: {status.text}"
            raise PeerStatus(status.code, text, status.trailing) from status
        # a port that was not connected is by now: by the connection that brought the answer
        self._facts[rpc] = (before or self.port.connection, fact)
        return fact


def _expands_volumes(answer: csi_pb2.GetPluginCapabilitiesResponse) -> bool:
    kinds = {capability.volume_expansion.type for capability in answer.capabilities}
    return bool(kinds - {csi_pb2.PluginCapability.VolumeExpansion.UNKNOWN})


def opted_in(call: Call) -> Metadata:
    """The caller's metadata with the opt-in to deferral."""
    kept = (pair for pair in call.metadata if pair[0] != extensions.KEY)
    return (*kept, *extensions.METADATA)


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
