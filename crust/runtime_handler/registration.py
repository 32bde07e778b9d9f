"""Register with the proxy, and stay registered.

The open stream is the lease: while it is open the proxy hands volumes to this handler; when it ends, for whatever
reason, the proxy has forgotten us and we come back. A proxy that restarted is found within a fraction of a second
(the channel retries by itself, see `crust.rpc.channel`); a refusal, such as a name that is still taken, is retried
with a growing pause. A hello that can never be accepted ends the registration with the proxy's own error. Running
sandboxes do not notice any of it.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio

from crust import errors, volumes
from crust.rpc import channel, status
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc, types_pb2

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0


Feature = volumes.HandlerFeature


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """What a handler says of itself. `endpoint` is the path of the socket on which it serves RuntimeHandler."""

    name: volumes.HandlerName
    version: str
    endpoint: str
    filesystems: frozenset[str]
    features: frozenset[Feature] = frozenset()


@dataclass(frozen=True, slots=True)
class RegisterResponse:
    """What the proxy answers. `volumes_directory` is the handoff directory."""

    volumes_directory: str
    proxy_version: str


class Registration:
    """A lease with the proxy behind `proxy_socket`.

    `registered` and `lost` are each other's opposite: a caller may wait for either. `response` is the proxy's last
    response, `error` the reason of the last loss or refusal.
    """

    def __init__(self, proxy_socket: str, request: RegisterRequest) -> None:
        self.registered = asyncio.Event()
        self.lost = asyncio.Event()
        self.lost.set()
        self.response: RegisterResponse | None = None
        self.error: errors.CrustError | None = None
        self._socket = proxy_socket
        self._request = request

    async def run(self) -> None:
        """Be registered until cancelled. Raises `errors.InvalidRequest` when the hello can never be accepted."""
        to_proxy = channel.connect(self._socket)
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                if await self._hold_session(to_proxy):
                    pause_s = _FIRST_PAUSE_S
                await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        finally:
            await to_proxy.close()

    async def _hold_session(self, to_proxy: grpc.aio.Channel) -> bool:
        """Register and stay until the stream ends; returns whether there ever was a welcome."""
        stub: handlers_pb2_grpc.HandlerRegistryAsyncStub
        stub = handlers_pb2_grpc.HandlerRegistryStub(to_proxy)
        answered = False
        try:
            # wait_for_ready: while the proxy is away this waits on the channel, which looks for it all the time.
            async for answer in stub.Register(_to_wire(self._request), wait_for_ready=True):
                answered = True
                self._enter(answer)
            self.error = errors.PeerUnavailable("the proxy ended the registration")
        except grpc.aio.AioRpcError as err:
            self._refused(status.to_error(err))
        finally:
            self._leave(answered=answered)
        return answered

    def _enter(self, answer: handlers_pb2.RegisterResponse) -> None:
        self.response = RegisterResponse(answer.volumes_directory, answer.proxy_version)
        self.lost.clear()
        self.registered.set()
        _log.info(
            "registered with the proxy",
            extra={"proxy": self._socket, "handler": self._request.name},
        )

    def _refused(self, error: errors.CrustError) -> None:
        self.error = error
        if isinstance(error, errors.InvalidRequest):
            raise error

    def _leave(self, *, answered: bool) -> None:
        self.registered.clear()
        self.lost.set()
        event = "lost the proxy" if answered else "not registered"
        _log.warning(event, extra={"proxy": self._socket, "error": str(self.error or "")})


@contextlib.asynccontextmanager
async def registered(proxy_socket: str, request: RegisterRequest) -> AsyncIterator[Registration]:
    """Keep a registration while the block runs; entering does not wait for the proxy, it may come later.

    A hello that is refused for good cancels the block, and leaving raises the refusal in an exception group.
    """
    registration = Registration(proxy_socket, request)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(registration.run(), name=f"registration of {request.name}")
        try:
            yield registration
        finally:
            task.cancel()


def _to_wire(request: RegisterRequest) -> handlers_pb2.RegisterRequest:
    return handlers_pb2.RegisterRequest(
        name=request.name,
        version=request.version,
        endpoint=request.endpoint,
        volume_types=[types_pb2.VolumeType.BLOCK],
        filesystems=sorted(request.filesystems),
        features=sorted(
            handlers_pb2.HandlerFeature.ValueType(each.value) for each in request.features
        ),
    )
