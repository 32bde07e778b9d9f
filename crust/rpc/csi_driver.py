"""The CSI driver, or the shim in front of it, at the other end of a port: its calls, name and capabilities.

An operator may replace a driver behind a socket by another version at any time, which shows as a new connection. So
crust keeps the driver's answers only while the port has the same connection: a driver that was downgraded would
ignore `defer_fs_ops` and mount on the host. crust raises a status of the driver unchanged (`PeerStatus`).
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from crust.core import errors, volumes
from crust.rpc.call import Call, Metadata
from crust.rpc.messages import extensions
from crust.rpc.port import Port, decoded, stub
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

CHANGE_TIMEOUT_S = 110.0
"""For a call that changes something, of an operation that outlives its caller: below a kubelet's two minutes."""

QUESTION_TIMEOUT_S = 10.0
"""For one question about the driver, which needs no storage."""

_RPC = csi_pb2.NodeServiceCapability.RPC

T = TypeVar("T")


class _Question(NamedTuple, Generic[T]):
    """A method with an empty request, the reader of its answer, and its metadata."""

    method: str
    read: Callable[[bytes], T]
    metadata: Metadata = ()


def numbers_in(answer: csi_pb2.NodeGetCapabilitiesResponse) -> frozenset[int]:
    return frozenset(capability.rpc.type for capability in answer.capabilities)


_NAME = _Question(
    "/csi.v1.Identity/GetPluginInfo",
    lambda answer: volumes.DriverName(csi_pb2.GetPluginInfoResponse.FromString(answer).name),
)
_EXPANDS = _Question(
    "/csi.v1.Identity/GetPluginCapabilities",
    lambda answer: any(
        capability.volume_expansion.type != csi_pb2.PluginCapability.VolumeExpansion.UNKNOWN
        for capability in csi_pb2.GetPluginCapabilitiesResponse.FromString(answer).capabilities
    ),
)
_NODE_CAPABILITIES = _Question(
    "/csi.v1.Node/NodeGetCapabilities",
    lambda answer: numbers_in(csi_pb2.NodeGetCapabilitiesResponse.FromString(answer)),
    extensions.METADATA,
)


class CsiDriver:
    """The driver at the other end of `port`, which the caller closes after this. `node` is its Node service."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.node = stub(csi_pb2_grpc.NodeStub, port)
        self._facts: dict[_Question[Any], tuple[int, Any]] = {}
        """The last answers, each with the connection by which it came."""
        self._asks: asyncio.Task[None] | None = None

    def known_name(self) -> str:
        """The driver's name for logs and metrics; empty until it has answered once.

        It asks only over an existing connection: a new attempt to connect would delay the next call.
        """
        _, name = self._facts.get(_NAME, (0, ""))
        if not name and self.port.connection and (self._asks is None or self._asks.done()):
            self._asks = asyncio.create_task(self._ask_name(), name="driver name")
        return str(name)

    async def _ask_name(self) -> None:
        with contextlib.suppress(PeerStatus):  # `known_name` asks again
            await self.name()

    async def name(self, timeout_s: float | None = QUESTION_TIMEOUT_S) -> volumes.DriverName:
        """The driver's own name; raises `PeerStatus`."""
        return await self._fact(_NAME, timeout_s)

    async def node_capabilities(
        self, timeout_s: float | None = QUESTION_TIMEOUT_S
    ) -> frozenset[int]:
        """The numbers of the capabilities of the driver that is connected; raises `PeerStatus`."""
        return await self._fact(_NODE_CAPABILITIES, timeout_s)

    async def expands_volumes(self, timeout_s: float | None = QUESTION_TIMEOUT_S) -> bool:
        """Whether the driver that is connected expands volumes at all; raises `PeerStatus`."""
        return await self._fact(_EXPANDS, timeout_s)

    async def defers(self, timeout_s: float | None = QUESTION_TIMEOUT_S) -> bool:
        """Whether it advertises DEFER_FS_OPS; raises `PeerStatus`.

        It asks again after a "no": behind a shim, the driver may be replaced without a new connection.
        """
        defers = _RPC.DEFER_FS_OPS in await self._fact(_NODE_CAPABILITIES, timeout_s)
        if not defers:
            self._facts.pop(_NODE_CAPABILITIES, None)
        return defers

    async def check_defers(self, timeout_s: float | None = QUESTION_TIMEOUT_S) -> None:
        """Raise `DeferralUnsupported`, or `PeerStatus`, unless the driver defers."""
        if not await self.defers(timeout_s):
            raise errors.Unsupported.named(
                "DeferralUnsupported",
                "the mount cannot be deferred",
                why="the driver does not advertise DEFER_FS_OPS",
            )

    async def check_name(self, configured: str) -> None:
        """Raise `DriverNameMismatch`, or `PeerStatus`, unless the driver has the name."""
        reported = await self._fact(_NAME, QUESTION_TIMEOUT_S)
        if reported != configured:
            raise errors.NotReady.named(
                "DriverNameMismatch",
                f"volumes of driver {configured!r} cannot be deferred",
                why=f"the driver behind that socket calls itself {reported[:63]!r}",
            )

    def missing(self, name: str, socket_path: str) -> errors.CrustError | None:
        """The error if there is no connection; then the port begins to connect."""
        if self.port.is_connected():
            return None
        return errors.PeerUnavailable.named(
            "DriverNotConnected",
            f"the driver {name or 'of this shim'} cannot be reached",
            why=f"there is no connection to {socket_path}",
        )

    async def aclose(self) -> None:
        """Ask no more; before the port is closed."""
        if self._asks is not None:
            self._asks.cancel()
            await asyncio.wait([self._asks])

    async def _fact(self, question: _Question[T], timeout_s: float | None) -> T:
        """The driver's answer over the connection that exists now; asks if there is none.

        The caller has sent another call: a status of the driver to this question says so.
        """
        connected = self.port.connection
        fact: T
        fact_connection, fact = self._facts.get(question, (0, None))
        if connected and connected == fact_connection:
            return fact
        try:
            call = Call(question.method, question.metadata, timeout_s)
            answer = await self.port.answer(call, b"")
            fact = decoded(question.read, answer, question.method)
        except PeerStatus as status:
            if status.text.startswith("["):
                raise  # an error of crust, whose name must stay in front (docs/api.md)
            rpc = question.method.rpartition("/")[2]
            text = f"the driver was asked {rpc} first, and answered: {status.text}"
            raise PeerStatus(status.code, text, status.trailing) from status
        # an answer needs a connection, which may be new
        self._facts[question] = (connected or self.port.connection, fact)
        return fact


def with_opt_in(call: Call) -> Metadata:
    others = (pair for pair in call.metadata if pair[0] != extensions.KEY)
    return (*others, *extensions.METADATA)
