"""Pass-through calls: the server behind gets the caller's bytes, the caller gets the server's.

Nothing is parsed, so unknown fields, unknown methods and other services pass unchanged. So do metadata, the caller's
deadline (less a second, so that the caller hears the reason), its cancellation, and status codes with their details.
A method that the descriptors define as unary uses gRPC's faster unary path; any other travels as one request with a
stream of answers, which is the same on the wire for a call with one answer. No method of CSI has a stream of
requests: of such a stream the first message passes (D-28).
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from crust import errors
from crust.rpc.in_process import local
from crust.rpc.messages import requests
from crust.wire.csi.v1 import csi_pb2

Context = grpc.aio.ServicerContext[bytes, bytes]
UnaryBehaviour = Callable[[bytes, Context], Awaitable[bytes]]
Metadata = tuple[tuple[str, str | bytes], ...]
Request = TypeVar("Request", bound=Message)
Answer = Callable[[Request, bytes, Context], Awaitable[bytes]]
"""Takes a request, its bytes and the call's context."""

_HOP_BY_HOP = ("user-agent", "grpc-accept-encoding", "accept-encoding")


def unary_methods() -> frozenset[str]:
    """Full names (`/csi.v1.Node/NodeStageVolume`) of CSI's unary methods."""
    return frozenset(
        f"/{service.full_name}/{method.name}"
        for service in csi_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    )


class Passthrough(grpc.GenericRpcHandler):
    """Passes every method through to `channel`, except those in `own`, which get and return bytes."""

    def __init__(
        self, channel: grpc.aio.Channel, own: dict[str, UnaryBehaviour] | None = None
    ) -> None:
        self._channel = channel
        self._unary = unary_methods()
        self._handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            method: grpc.unary_unary_rpc_method_handler(behaviour)
            for method, behaviour in (own or {}).items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method; created once per unary method."""
        method = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is not None:
            return handler
        if method not in self._unary:  # not cached: callers choose the names, without a bound
            return grpc.unary_stream_rpc_method_handler(_streaming(self._channel, method))
        handler = grpc.unary_unary_rpc_method_handler(forward(self._channel, method))
        self._handlers[method] = handler
        return handler


def parsed(kind: type[Request], answer: Answer[Request]) -> UnaryBehaviour:
    """A behaviour that parses its request, and relays the status of a peer that it calls."""

    async def behave(data: bytes, context: Context) -> bytes:
        try:
            return await answer(requests.parse(kind, data), data, context)
        except grpc.aio.AioRpcError as error:
            return await relay_status(context, error)

    return behave


def forward(channel: grpc.aio.Channel, method: str) -> UnaryBehaviour:
    """A behaviour that passes a unary call through unchanged: to a part of this process with its own context."""
    inner = local.passed(channel, method)
    if inner is not None:
        return inner
    passed = call(channel, method)

    async def behave(request: bytes, context: Context) -> bytes:
        try:
            return await passed(request, context)
        except grpc.aio.AioRpcError as error:
            await relay_status(context, error)

    return behave


def call(channel: grpc.aio.Channel, method: str) -> UnaryBehaviour:
    """The same, but the peer's status is raised (`grpc.aio.AioRpcError`), for its caller to relay."""
    peer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)

    async def behave(request: bytes, context: Context) -> bytes:
        timeout_s = _shortened(context.time_remaining())
        began_s = time.monotonic()
        running = peer(request, metadata=metadata_of(context), timeout=timeout_s)
        try:
            initial = await running.initial_metadata()
            if len(initial):
                await context.send_initial_metadata(_pairs(initial))
            response: bytes = await running
            context.set_trailing_metadata(_pairs(await running.trailing_metadata()))
        except grpc.aio.AioRpcError as error:
            elapsed_s = time.monotonic() - began_s
            if timeout_s is not None and _ran_out(error, elapsed_s, timeout_s):
                raise errors.PeerUnavailable.named(
                    "PeerNotResponding",
                    f"{method.rpartition('/')[2]} was not answered",
                    why=(
                        "the driver or shim that it was passed on to has not answered for "
                        f"{elapsed_s:.1f} s"
                    ),
                    hint=(
                        "look at that process, its log, and the storage behind it; the caller may "
                        "retry"
                    ),
                ) from error
            raise
        finally:
            # awaiting initial metadata does not cancel the call by itself when our caller goes away
            running.cancel()
        return response

    return behave


_RESERVE_S = 1.0
"""Of the caller's time, a tenth of it at most: so that the caller hears the reason before its own deadline."""


def _shortened(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else timeout_s - min(_RESERVE_S, timeout_s / 10)


def _ran_out(error: grpc.aio.AioRpcError, elapsed_s: float, timeout_s: float) -> bool:
    """Whether our own deadline ended the call; a peer's DEADLINE_EXCEEDED that came earlier is its status."""
    return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and elapsed_s >= timeout_s - 0.01


def metadata_of(context: grpc.aio.ServicerContext[Any, Any]) -> Metadata:
    """The caller's metadata without that of its connection."""
    return _pairs(context.invocation_metadata())


async def relay_status(
    context: grpc.aio.ServicerContext[Any, Any], error: grpc.aio.AioRpcError
) -> NoReturn:
    """Answer with exactly the peer's status. Does not return."""
    trailing = _pairs(error.trailing_metadata())
    await context.abort(error.code(), error.details() or "", trailing)


def _streaming(
    channel: grpc.aio.Channel, method: str
) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
    async def behave(request: bytes, context: Context) -> AsyncIterator[bytes]:
        peer: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
        call = peer(request, metadata=metadata_of(context), timeout=context.time_remaining())
        try:
            initial = await call.initial_metadata()
            if len(initial):
                await context.send_initial_metadata(_pairs(initial))
            async for response in call:
                yield response
            context.set_trailing_metadata(_pairs(await call.trailing_metadata()))
        except grpc.aio.AioRpcError as error:
            await relay_status(context, error)
        finally:
            call.cancel()

    return behave


def _pairs(metadata: Any) -> Metadata:
    return tuple((key, value) for key, value in metadata or () if key not in _HOP_BY_HOP)
