"""Who answers a call while a process is taken over: this process, nobody yet, or its successor.

A gate is normally open. When a successor asks for the state, the gate closes: new calls wait, running calls finish.
Once the successor has the state, calls that wait, and later calls on old connections, are forwarded to it as bytes.
So a caller waits and sees no error, and two processes never write at the same time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from crust.rpc import passthrough, requests, status

Handler = Any
"""grpc.RpcMethodHandler, which is generic in its stubs only."""


def needs_state(method: str) -> bool:
    """Whether a method reads or writes the state: all but identity, health and capabilities do."""
    return not (method.startswith("/csi.v1.Identity/") or method.endswith("Capabilities"))


class Gate:
    """The gate of one server. `gated` says which methods wait while it is closed; a stream waits only at its start.

    Gates of a lower stage close first: a call that runs there may need one of a higher stage to finish.
    """

    def __init__(self, gated: Callable[[str], bool] = needs_state, *, stage: int = 1) -> None:
        self.gated = gated
        self.stage = stage
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0
        self._successor: grpc.aio.Channel | None = None

    def close(self) -> None:
        """Let new calls wait."""
        self._open.clear()

    def reopen(self) -> None:
        """Serve the calls that wait, and new ones."""
        self._open.set()

    def forward_to(self, successor: grpc.aio.Channel) -> None:
        """Forward the calls that wait, and all later ones."""
        self._successor = successor
        self._open.set()

    async def idle(self) -> None:
        """Wait until no call runs in this process."""
        await self._idle.wait()

    async def opened(self) -> grpc.aio.Channel | None:
        """Wait until it is known who answers: the successor, or (None) this process."""
        while not self._open.is_set():
            await self._open.wait()
        return self._successor

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[grpc.aio.Channel | None]:
        """As `opened`; if this process answers, the call counts as running while the block runs."""
        successor = await self.opened()
        if successor is not None:
            yield successor
            return
        self._running += 1
        self._idle.clear()
        try:
            yield None
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


class GateInterceptor(grpc.aio.ServerInterceptor):
    """Puts a gate before a server's methods. The outermost interceptor: a forwarded call is not logged or counted."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler, which gets its messages as bytes."""
        method: str = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or not self._gate.gated(method):
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._unary(method, handler))
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._streaming(method, handler))
        return handler

    def _unary(self, method: str, handler: Handler) -> passthrough.UnaryBehaviour:
        async def behave(data: bytes, context: passthrough.Context) -> bytes:
            async with self._gate.entered() as successor:
                if successor is not None:
                    return await passthrough.forward(successor, method)(data, context)
                request = await _decoded(handler, method, data, context)
                answer = await handler.unary_unary(request, context)
                return _encoded(handler, answer)

        return behave

    def _streaming(
        self, method: str, handler: Handler
    ) -> Callable[[bytes, passthrough.Context], AsyncIterator[bytes]]:
        async def behave(data: bytes, context: passthrough.Context) -> AsyncIterator[bytes]:
            successor = await self._gate.opened()
            if successor is not None:
                async for each in passthrough.forward_stream(successor, method, data, context):
                    yield each
                return
            request = await _decoded(handler, method, data, context)
            async for answer in handler.unary_stream(request, context):
                yield _encoded(handler, answer)

        return behave


async def _decoded(handler: Handler, method: str, data: bytes, context: passthrough.Context) -> Any:
    if handler.request_deserializer is None:
        return data
    try:
        return handler.request_deserializer(data)
    except requests.DecodeError:
        error = requests.MalformedMessage(f"a request of {method}")
        return await status.abort(context, error, is_csi=method.startswith("/csi."))


def _encoded(handler: Handler, answer: Any) -> bytes:
    encode = handler.response_serializer
    encoded: bytes = answer if encode is None else encode(answer)
    return encoded
