"""gRPC between two parts of one process, without a socket.

A `LocalServer` takes the same servicers, generic handlers and interceptor as a server on a socket, and `LocalPort`
calls it. So a part does not know which port it has: messages are serialised, deadlines and cancellation reach the
handler, statuses and metadata come back. What differs is the cost: a call runs in its caller's task, where a socket
takes system calls and passes through gRPC's threads each way.

Requests of more than one message are refused: no method of CSI or crust.v1 has them. A server may be made before its
servicers are: until it is opened a call is UNAVAILABLE, as at a socket that nobody serves yet.

A call here is one step of a call that came in by a socket. So it keeps that call's id, and is logged at DEBUG.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc

from crust import logs
from crust.rpc.in_process import local_calls
from crust.rpc.in_process.local_calls import NotServedYet, Server
from crust.rpc.port import Answers, Heard, Port
from crust.rpc.serving import interceptors
from crust.rpc.serving.call_record import Served
from crust.rpc.serving.health import Health
from crust.rpc.serving.method_handlers import Handler, decoded, encoded
from crust.rpc.status import Metadata, PeerStatus


class LocalServer:
    """Servicers of this process, once it is opened."""

    def __init__(self) -> None:
        self._interceptor: interceptors.CallInterceptor | None = None
        self._generic: list[grpc.GenericRpcHandler] = []
        self._handlers: dict[str, Handler] = {}

    def open(
        self,
        name: str,
        health: Health,
        generic: Sequence[grpc.GenericRpcHandler] = (),
        admit: Callable[[str], None] | None = None,
        driver: Callable[[], str] = lambda: "",
    ) -> None:
        """Answer calls. `name`, `admit` and `driver` are as at `server.serving`."""
        self._generic.extend(generic)
        served = Served(name, driver)
        self._interceptor = interceptors.CallInterceptor(served, health, admit, is_inner=True)

    def close(self) -> None:
        """Answer no more calls; those that run go on."""
        self._interceptor = None
        self._generic.clear()
        self._handlers.clear()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """As grpc.aio.Server has it: what the generated `add_…Servicer_to_server` calls."""
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """The same handlers once more, by name: nothing to do."""

    async def handler(self, method: str) -> Handler:
        """The handler of a method, with the interceptor around it; None if there is none."""
        if method not in self._handlers:
            if self._interceptor is None:
                raise NotServedYet(method)
            found = await self._interceptor.intercept_service(self._find, _Details(method))
            if found is None:
                return None
            self._handlers[method] = found
        return self._handlers[method]

    async def _find(self, details: grpc.HandlerCallDetails) -> Handler:
        services = (each.service(details) for each in self._generic)
        return next((found for found in services if found is not None), None)


class LocalPort(Port):
    """The end within the process: a method runs in its caller's task."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server

    @property
    def connection(self) -> int:
        """Always the first one."""
        return 1

    def is_connected(self) -> bool:
        """Always."""
        return True

    async def call(
        self,
        method: str,
        data: bytes,
        metadata: Metadata = (),
        timeout_s: float | None = None,
        heard: Heard | None = None,
        *,
        wait_for_ready: bool = False,
    ) -> bytes:
        """See `Port`."""
        context = local_calls.Context(metadata, timeout_s)
        # A caller that serves no call itself, e.g. what runs in the background, has no fields after it either: its
        # next call would be logged, and named to a handler, as this one.
        around = logs.context.get()
        try:
            answer = await local_calls.answer(self.server, method, data, context)
        finally:
            logs.context.set(around)
        if heard is not None:
            heard.initial, heard.trailing = context.initial, context.trailing
        return answer

    def stream(
        self,
        method: str,
        data: bytes,
        metadata: Metadata = (),
        timeout_s: float | None = None,
        *,
        wait_for_ready: bool = False,
    ) -> Answers[bytes]:
        """See `Port`. The method runs while its reader waits for an answer, and no longer."""
        context = local_calls.Context(metadata, timeout_s)
        return _LocalAnswers(local_calls.stream(self.server, method, data, context), context)

    async def aclose(self) -> None:
        """Nothing to do."""


class _LocalAnswers(Answers[bytes]):
    def __init__(self, answers: AsyncGenerator[bytes, None], context: local_calls.Context) -> None:
        self._answers = answers
        self._context = context
        self._fields = logs.context.get()

    async def initial_metadata(self) -> Metadata:
        return self._context.initial

    async def trailing_metadata(self) -> Metadata:
        return self._context.trailing

    async def aclose(self) -> None:
        await self._answers.aclose()

    async def __anext__(self) -> bytes:
        """A method runs with its own fields, and its reader goes on with those of the reader."""
        around = logs.context.get()
        logs.context.set(self._fields)
        try:
            async with asyncio.timeout(self._context.time_remaining()):
                return await anext(self._answers)
        except TimeoutError:
            raise PeerStatus(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        finally:
            self._fields = logs.context.get()
            logs.context.set(around)


class LocalMethod:
    """A method of a local server, for a call that its caller's own context goes with, unchanged."""

    def __init__(self, server: Server, method: str) -> None:
        self._server = server
        self._method = method

    async def __call__(self, data: bytes, context: Any) -> bytes:
        """Answer the bytes of a request; raises `NotServedYet`, and ends the call where the method would."""
        handler = await self._server.handler(self._method)
        if handler is None or handler.unary_unary is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, local_calls.NO_METHOD)
        answer = await handler.unary_unary(decoded(handler, data), context)
        return encoded(handler, answer)


def passed(port: Port, method: str) -> LocalMethod | None:
    """The method of one answer behind a local port; None for a port to a socket."""
    return LocalMethod(port.server, method) if isinstance(port, LocalPort) else None


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()
