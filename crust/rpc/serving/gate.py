"""Who answers a call while a process is taken over: this process, nobody yet, or its successor.

A gate is normally open. When a successor asks for the state, the gate closes: new calls wait, running calls finish.
Once the successor has the state, calls that wait, and later calls on old connections, are forwarded to it as bytes.
So a caller waits and sees no error, and two processes never write at the same time.

When this process then ends, its callers must leave it without an error. gRPC refuses calls that reach a server
between its stop and the moment when the caller knows of it: with CANCELLED, which no client repeats by itself. So
answers are held for a moment, until no more calls come, and are sent after the notice to leave (GOAWAY): a caller
that waits for an answer before it calls again calls the successor. A caller that sends its call at that very moment,
without waiting for another, may still get CANCELLED, and nobody has carried that call out.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio

from crust.rpc import passthrough, status
from crust.rpc.messages import requests
from crust.rpc.serving.method_handlers import Handler, WrappedHandlers, decoded, encoded

QUIET_S = 0.05
"""So long no call has come: then every caller waits for an answer, or has none to ask for."""

HOLD_S = 1.0
"""How long answers are held at most, if calls go on to come."""


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
        self._may_answer = asyncio.Event()
        self._may_answer.set()
        self._arrivals = 0
        self._streams: set[asyncio.Task[Any]] = set()
        self.is_left = False

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

    async def hold_answers(self) -> None:
        """Keep the answers until `leave`; returns when no more calls come, or after `HOLD_S`."""
        self._may_answer.clear()
        seen = -1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S):
                while seen != self._arrivals:
                    seen = self._arrivals
                    await asyncio.sleep(QUIET_S)

    def leave(self) -> None:
        """The callers have been told to leave: send the answers, and end the streams that are forwarded."""
        self.is_left = True
        self._may_answer.set()
        for stream in self._streams:
            stream.cancel()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Around a call; its end waits while answers are held."""
        self._arrivals += 1
        try:
            yield
        finally:
            await self._may_answer.wait()

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Around a forwarded stream, which `leave` cancels."""
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            yield
        finally:
            self._streams.discard(task)

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


_LEFT = "this process was taken over and ends; call again, on a new connection"


class GateInterceptor(grpc.aio.ServerInterceptor):
    """Puts a gate before a server's methods. The outermost interceptor: a forwarded call is not logged or counted."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._wrapped = WrappedHandlers(self._wrap)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler, which gets its messages as bytes."""
        handler = await continuation(handler_call_details)
        return self._wrapped.of(handler_call_details.method, handler)

    def _wrap(self, method: str, handler: Handler) -> Handler:
        if not self._gate.gated(method):
            return self._ungated(handler)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._unary(method, handler))
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._streaming(method, handler))
        return handler

    def _ungated(self, handler: Handler) -> Handler:
        if handler.unary_unary is None:
            return handler

        async def behave(request: Any, context: passthrough.Context) -> Any:
            async with self._gate.answering():
                return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(
            behave, handler.request_deserializer, handler.response_serializer
        )

    def _unary(self, method: str, handler: Handler) -> passthrough.UnaryBehaviour:
        async def behave(data: bytes, context: passthrough.Context) -> bytes:
            async with self._gate.entered() as successor:
                if successor is not None:
                    return await self._forward(successor, method, data, context)
                request = await _decoded(handler, method, data, context)
                answer = await handler.unary_unary(request, context)
                return encoded(handler, answer)

        return behave

    async def _forward(
        self,
        successor: grpc.aio.Channel,
        method: str,
        data: bytes,
        context: passthrough.Context,
    ) -> bytes:
        try:
            async with self._gate.answering():
                return await passthrough.call(successor, method)(data, context)
        except grpc.aio.AioRpcError as error:
            await passthrough.relay_status(context, error)

    def _streaming(
        self, method: str, handler: Handler
    ) -> Callable[[bytes, passthrough.Context], AsyncIterator[bytes]]:
        async def behave(data: bytes, context: passthrough.Context) -> AsyncIterator[bytes]:
            successor = await self._gate.opened()
            if successor is not None:
                try:
                    with self._gate.streaming():
                        answers = passthrough.forward_stream(successor, method, data, context)
                        async for each in answers:
                            yield each
                except asyncio.CancelledError:
                    if not self._gate.is_left:
                        raise
                    await context.abort(grpc.StatusCode.UNAVAILABLE, _LEFT)
                return
            request = await _decoded(handler, method, data, context)
            async for answer in handler.unary_stream(request, context):
                yield encoded(handler, answer)

        return behave


async def _decoded(handler: Handler, method: str, data: bytes, context: passthrough.Context) -> Any:
    try:
        return decoded(handler, data)
    except requests.DecodeError:
        error = requests.MalformedMessage(f"a request of {method}")
        return await status.abort(context, error, is_csi=method.startswith("/csi."))
