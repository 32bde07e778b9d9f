"""Pass-through calls: the server behind gets the caller's bytes, the caller gets the server's.

Nothing is parsed, so unknown fields, unknown methods and other services pass unchanged. So do metadata, the caller's
deadline (less a second, so that the caller hears the reason), its cancellation, and status codes with their details.
A method that the descriptors define as unary uses gRPC's faster unary path; any other travels as one request with a
stream of answers, which is the same on the wire for a call with one answer. No method of CSI has a stream of
requests: of such a stream the first message passes (D-28).
"""

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from crust import errors
from crust.rpc.in_process import local
from crust.rpc.messages import requests
from crust.rpc.port import Heard, Port
from crust.rpc.status import Metadata, PeerStatus, pairs
from crust.wire.csi.v1 import csi_pb2

Context = grpc.aio.ServicerContext[bytes, bytes]
UnaryBehaviour = Callable[[bytes, Context], Awaitable[bytes]]
Request = TypeVar("Request", bound=Message)
Answer = Callable[[Request, bytes, Context], Awaitable[bytes]]
"""Takes a request, its bytes and the call's context."""


def unary_methods() -> frozenset[str]:
    """Full names (`/csi.v1.Node/NodeStageVolume`) of CSI's unary methods."""
    return frozenset(
        f"/{service.full_name}/{method.name}"
        for service in csi_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    )


class Passthrough(grpc.GenericRpcHandler):
    """Passes every method through to `port`, except those in `own`, which get and return bytes."""

    def __init__(self, port: Port, own: dict[str, UnaryBehaviour] | None = None) -> None:
        self._port = port
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
            return grpc.unary_stream_rpc_method_handler(_streaming(self._port, method))
        handler = grpc.unary_unary_rpc_method_handler(forward(self._port, method))
        self._handlers[method] = handler
        return handler


def parsed(kind: type[Request], answer: Answer[Request]) -> UnaryBehaviour:
    """A behaviour that parses its request."""

    async def behave(data: bytes, context: Context) -> bytes:
        return await answer(requests.parse(kind, data), data, context)

    return behave


def forward(port: Port, method: str) -> UnaryBehaviour:
    """A behaviour that passes a unary call through unchanged: to a part of this process with its own context."""
    inner = local.passed(port, method)
    if inner is not None:
        return inner

    async def behave(request: bytes, context: Context) -> bytes:
        timeout_s = _shortened(context.time_remaining())
        began_s, heard = time.monotonic(), Heard()
        try:
            response = await port.call(method, request, metadata_of(context), timeout_s, heard)
        except PeerStatus as status:
            elapsed_s = time.monotonic() - began_s
            if timeout_s is not None and _ran_out(status, elapsed_s, timeout_s):
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
                ) from status
            raise
        if heard.initial:
            await context.send_initial_metadata(heard.initial)
        context.set_trailing_metadata(heard.trailing)
        return response

    return behave


_RESERVE_S = 1.0
"""Of the caller's time, a tenth of it at most: so that the caller hears the reason before its own deadline."""


def _shortened(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else timeout_s - min(_RESERVE_S, timeout_s / 10)


def _ran_out(status: PeerStatus, elapsed_s: float, timeout_s: float) -> bool:
    """Whether our own deadline ended the call; a peer's DEADLINE_EXCEEDED that came earlier is its status."""
    return status.code is grpc.StatusCode.DEADLINE_EXCEEDED and elapsed_s >= timeout_s - 0.01


def metadata_of(context: grpc.aio.ServicerContext[Any, Any]) -> Metadata:
    """The caller's metadata without that of its connection."""
    return pairs(context.invocation_metadata())


def _streaming(port: Port, method: str) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
    async def behave(request: bytes, context: Context) -> AsyncIterator[bytes]:
        answers = port.stream(method, request, metadata_of(context), context.time_remaining())
        async with contextlib.aclosing(answers):
            initial = await answers.initial_metadata()
            if initial:
                await context.send_initial_metadata(initial)
            async for response in answers:
                yield response
            context.set_trailing_metadata(await answers.trailing_metadata())

    return behave
