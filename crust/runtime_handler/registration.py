"""Registers a handler with the proxy, and keeps it registered.

The open Register stream is the handler session: while it is open, the proxy publishes volumes to this handler; when
it ends, the proxy forgets the handler, and this module registers again. It finds a restarted proxy within a fraction
of a second, because the port reconnects by itself (`crust.rpc.port`). After a refusal, such as a name that is still
taken, it retries with a growing pause. If the proxy answers that the request is invalid, the registration ends with
the proxy's own error. None of this affects running sandboxes.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Self

from crust.core import errors, volumes
from crust.core.pauses import pauses
from crust.core.volumes import HandlerFeature
from crust.rpc import status
from crust.rpc.messages.crust_v1 import RegisterRequest, registration_to_wire
from crust.rpc.port import Port, SocketPort, stub
from crust.rpc.status import PeerStatus
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc

__all__ = ["RegisterRequest", "Registration"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
_SECRETS_S = 30.0


class Registration:
    """The handler sessions with the proxy behind `proxy_socket`, one after the other: `async with` keeps registered.

    `registered` and `lost` are each other's opposite: a caller may wait for either. `response` is the proxy's last
    response, whose `volumes_directory` is the handoff directory, `error` the reason of the last loss or refusal.
    """

    def __init__(self, proxy_socket: str, request: RegisterRequest) -> None:
        self.registered = asyncio.Event()
        self.lost = asyncio.Event()
        self.lost.set()
        self.response: handlers_pb2.RegisterResponse | None = None
        self.error: errors.CrustError | None = None
        self._socket = proxy_socket
        self._request = request
        self._registry: handlers_pb2_grpc.HandlerRegistryAsyncStub | None = None

    @property
    def name(self) -> volumes.HandlerName:
        return self._request.name

    @property
    def features(self) -> Collection[HandlerFeature]:
        """The handler's features, for `claim_volume`."""
        return self._request.features

    async def __aenter__(self) -> Self:
        """Register, and stay registered until the block ends. The block starts at once, even without a proxy.

        If the proxy will never accept the request, the block is cancelled, and its end raises the refusal.
        """
        self._group = await asyncio.TaskGroup().__aenter__()
        self._running = self._group.create_task(self.run(), name=f"registration of {self.name}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failed:
            if len(failed.exceptions) > 1:
                raise
            # the only exception: the refusal of the proxy, or the block's own
            raise failed.exceptions[0] from failed.exceptions[0].__cause__

    async def run(self) -> None:
        """Stay registered until cancelled. Raises `errors.InvalidRequest` if the proxy never accepts the request."""
        again = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            # a connection for each session: an old connection may lead to a proxy that was replaced
            async with SocketPort(self._socket) as to_proxy:
                answered = await self._hold_session(to_proxy)
            if answered:
                again = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            await asyncio.sleep(next(again))

    async def secrets_of(self, target: volumes.TargetPath) -> Mapping[str, str]:
        """The secrets of a volume that a sandbox of this handler has claimed; empty if it needs none.

        Keep them in memory only, and only until the volume is open. Raises `errors.NotReady` if the proxy does not
        see the claim, or was started after the publish and does not know them; `errors.NotFound`;
        `errors.PeerUnavailable` without a session.
        """
        registry = self._registry
        if registry is None:
            raise errors.PeerUnavailable(
                f"the secrets of the volume at {target} are not available",
                why="this handler is not registered with the proxy now",
                hint="retry after the registration; the log has the reason",
            )
        request = handlers_pb2.GetVolumeSecretsRequest(
            target_path=target.text, handler=self._request.name
        )
        try:
            answer = await registry.GetVolumeSecrets(request, timeout=_SECRETS_S)
        except PeerStatus as err:
            raise status.to_error(err) from err
        return dict(answer.secrets)

    async def _hold_session(self, to_proxy: Port) -> bool:
        """Register and wait until the stream ends; returns whether the proxy had accepted the registration."""
        registry = stub(handlers_pb2_grpc.HandlerRegistryStub, to_proxy)
        # the facts are in the messages too: a process of an author has the standard logging
        facts = {"proxy": self._socket, "handler": self._request.name}
        answered = False
        try:
            # wait_for_ready: without a proxy this waits for the port, which reconnects all the time.
            async for answer in registry.Register(
                registration_to_wire(self._request), wait_for_ready=True
            ):
                answered = True
                self._registry = registry
                self.response = answer
                self.lost.clear()
                self.registered.set()
                _log.info("registered with the proxy at %s as %s", *facts.values(), extra=facts)
            self.error = errors.PeerUnavailable("the proxy ended the registration")
        except PeerStatus as err:
            self._refused(status.to_error(err))
        finally:
            self._registry = None
            self.registered.clear()
            self.lost.set()
            event = (
                "lost the session with the proxy" if answered else "not registered with the proxy"
            )
            reason = str(self.error or "the registration was stopped")
            extra = {**facts, "error": reason}
            _log.warning("%s at %s as %s: %s", event, *facts.values(), reason, extra=extra)
        return answered

    def _refused(self, error: errors.CrustError) -> None:
        self.error = error
        if isinstance(error, errors.InvalidRequest):
            raise error
