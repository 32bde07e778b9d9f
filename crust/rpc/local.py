"""gRPC between two parts of one process, without a socket.

A `LocalServer` takes the same servicers, generic handlers and interceptor as a server on a socket, and its channel
has the methods of a gRPC channel that crust uses. So a part does not know which of the two it talks through: messages
are serialised, deadlines and cancellation reach the handler, statuses and metadata come back. What differs is the
cost: a call is a task, where a socket takes system calls and passes through gRPC's threads each way.

Requests of more than one message are refused: no method of CSI or crust.v1 has them. A server may be made before its
servicers are: until it is opened a call is UNAVAILABLE, as at a socket that nobody serves yet.

A call here is one step of a call that came in by a socket. So it keeps that call's id, and is logged at DEBUG.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from crust import errors, logs
from crust.rpc import interceptors
from crust.rpc.health import Health

Metadata = Sequence[tuple[str, str | bytes]]
Handler = Any
"""grpc.RpcMethodHandler, which is generic in its stubs only."""
_Serialize = Callable[[Any], bytes] | None
_Parse = Callable[[bytes], Any] | None


class NotServedYet(errors.PeerUnavailable):
    """A part of this process is not started yet, or has ended."""

    def __init__(self, method: str) -> None:
        super().__init__(
            f"{method.rpartition('/')[2]} cannot be answered",
            why="the part of this process that answers it does not run",
            hint="retry: the process is starting or stopping",
        )


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
        served = interceptors.Served(name, driver)
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

    def channel(self) -> grpc.aio.Channel:
        """A channel to these servicers."""
        return cast("grpc.aio.Channel", _Channel(self))

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


class Passed:
    """A method of a local server, for a call that its caller's own context goes with, unchanged."""

    def __init__(self, server: LocalServer, method: str) -> None:
        self._server = server
        self._method = method

    async def __call__(self, data: bytes, context: Any) -> bytes:
        """Answer the bytes of a request; raises `NotServedYet`, and ends the call where the method would."""
        handler = await self._server.handler(self._method)
        if handler is None or handler.unary_unary is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, _NO_METHOD)
        answer = await handler.unary_unary(_parsed(handler, data), context)
        return _encoded(handler, answer)


def passed(channel: grpc.aio.Channel, method: str) -> Passed | None:
    """The method of one answer behind a local channel; None for a channel to a socket."""
    if not isinstance(channel, _Channel):
        return None
    return Passed(channel.server, method)


_NO_METHOD = "Method not found!"


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class _Channel:
    """What crust uses of grpc.aio.Channel. It is always connected."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server
        self._closed = asyncio.Event()

    def unary_unary(
        self,
        method: str,
        request_serializer: _Serialize = None,
        response_deserializer: _Parse = None,
        _registered_method: bool | None = False,  # noqa: FBT001, FBT002 - as gRPC has it
    ) -> Callable[..., "_UnaryCall"]:
        def call(
            request: Any,
            *,
            timeout: float | None = None,
            metadata: Metadata | None = None,
            **_: Any,
        ) -> _UnaryCall:
            data = request if request_serializer is None else request_serializer(request)
            context = _Context(metadata or (), timeout)
            return _UnaryCall(self.server, method, data, context, response_deserializer)

        return call

    def unary_stream(
        self,
        method: str,
        request_serializer: _Serialize = None,
        response_deserializer: _Parse = None,
        _registered_method: bool | None = False,  # noqa: FBT001, FBT002 - as gRPC has it
    ) -> Callable[..., "_StreamCall"]:
        def call(
            request: Any,
            *,
            timeout: float | None = None,
            metadata: Metadata | None = None,
            **_: Any,
        ) -> _StreamCall:
            data = request if request_serializer is None else request_serializer(request)
            context = _Context(metadata or (), timeout)
            return _StreamCall(self.server, method, data, context, response_deserializer)

        return call

    def stream_stream(self, method: str, *_: Any, **__: Any) -> Callable[..., "_StreamCall"]:
        def call(_requests: Any, **_: Any) -> _StreamCall:
            return _StreamCall(self.server, "", b"", _Context((), None), None)

        return call

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        if self._closed.is_set():
            return grpc.ChannelConnectivity.SHUTDOWN
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        if last_observed_state is grpc.ChannelConnectivity.READY:
            await self._closed.wait()

    async def close(self, grace: float | None = None) -> None:
        self._closed.set()

    async def __aenter__(self) -> "_Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Context:
    """What crust uses of grpc.aio.ServicerContext, and the outcome of the call."""

    def __init__(self, metadata: Metadata, timeout_s: float | None) -> None:
        self._metadata = tuple(metadata)
        self.timeout_s = timeout_s
        self._ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.initial: Metadata | None = None
        self.on_initial: Callable[[], None] = lambda: None
        self.trailing: Metadata = ()
        self._code = grpc.StatusCode.OK
        self._details = ""

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._ends_s is None else max(0.0, self._ends_s - time.monotonic())

    async def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        if self.initial is None:
            self.initial = tuple(initial_metadata)
            self.on_initial()

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        self.trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Metadata:
        return self.trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        self._code, self._details = code, details
        self.trailing = tuple(trailing_metadata) or self.trailing
        raise grpc.aio.AbortError("aborted")

    def failed(
        self, code: grpc.StatusCode | None = None, details: str = ""
    ) -> grpc.aio.AioRpcError:
        """The error that the caller gets."""
        return grpc.aio.AioRpcError(
            code or self._code,
            grpc.aio.Metadata(*(self.initial or ())),
            grpc.aio.Metadata(*self.trailing),
            details or self._details,
        )


class _UnaryCall:
    """A call with one answer, which one task awaits: it runs there, from the first await on."""

    def __init__(
        self, server: LocalServer, method: str, data: bytes, context: _Context, parse: _Parse
    ) -> None:
        self._begin = partial(_answer, server, method, data, context)
        self._context = context
        self._parse = parse
        self._answered: bytes | grpc.aio.AioRpcError | None = None

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self._end().__await__()
        if isinstance(self._answered, grpc.aio.AioRpcError):
            raise self._answered
        assert self._answered is not None
        return self._answered if self._parse is None else self._parse(self._answered)

    async def initial_metadata(self) -> Metadata:
        await self._end()
        return self._context.initial or ()

    async def trailing_metadata(self) -> Metadata:
        await self._end()
        return self._context.trailing

    def cancel(self) -> bool:
        """Nothing to do: the call is cancelled with the task that awaits it."""
        return False

    async def _end(self) -> None:
        if self._answered is not None:
            return
        # A caller that serves no call itself, e.g. what runs in the background, has no fields after it either: its
        # next call would be logged, and named to a handler, as this one.
        around = logs.context.get()
        try:
            self._answered = await self._begin()
        except grpc.aio.AioRpcError as error:
            self._answered = error
        finally:
            logs.context.set(around)


class _StreamCall:
    """A call with a stream of answers. It has a task of its own, because its reader may be slow."""

    def __init__(
        self, server: LocalServer, method: str, data: bytes, context: _Context, parse: _Parse
    ) -> None:
        self._context = context
        self._begun = asyncio.Event()
        context.on_initial = self._begun.set
        self._answers: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        pumped = _pump(server, method, data, context, self._answers)
        self._task = asyncio.create_task(pumped, name=f"local {method}")
        self._task.add_done_callback(self._ended)
        self._parse = parse

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._begun.set()
        if not task.cancelled():
            task.exception()  # the caller may not look at it

    async def initial_metadata(self) -> Metadata:
        await self._begun.wait()
        return self._context.initial or ()

    async def trailing_metadata(self) -> Metadata:
        await asyncio.wait([self._task])
        return self._context.trailing

    def cancel(self) -> bool:
        return self._task.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while (answer := await self._next()) is not None:
                yield answer if self._parse is None else self._parse(answer)
        finally:
            if not self._task.done():
                self._task.cancel()
        await self._task

    async def _next(self) -> bytes | None:
        """The next answer; None when the handler has ended."""
        if self._answers.empty():
            getter = asyncio.create_task(self._answers.get())
            try:
                await asyncio.wait({getter, self._task}, return_when=asyncio.FIRST_COMPLETED)
                if getter.done():
                    return getter.result()
            finally:
                getter.cancel()
        return None if self._answers.empty() else self._answers.get_nowait()


async def _answer(server: LocalServer, method: str, data: bytes, context: _Context) -> bytes:
    handler = await _handler(server, method, context)
    try:
        async with asyncio.timeout(context.timeout_s):
            if handler.unary_unary is None:
                return await _only(_answers(handler, data, context), context)
            answer = await handler.unary_unary(_parsed(handler, data), context)
    except TimeoutError:
        raise context.failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
    except grpc.aio.AbortError:
        raise context.failed() from None
    return _encoded(handler, answer)


async def _pump(
    server: LocalServer,
    method: str,
    data: bytes,
    context: _Context,
    answers: "asyncio.Queue[bytes]",
) -> None:
    handler = await _handler(server, method, context)
    try:
        async with asyncio.timeout(context.timeout_s):
            async for answer in _answers(handler, data, context):
                await context.send_initial_metadata(())  # unless it was sent before
                await answers.put(answer)
    except TimeoutError:
        raise context.failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
    except grpc.aio.AbortError:
        raise context.failed() from None


async def _handler(server: LocalServer, method: str, context: _Context) -> Handler:
    try:
        handler = await server.handler(method) if method else None
    except NotServedYet as error:
        raise context.failed(grpc.StatusCode.UNAVAILABLE, error.shown()) from error
    if handler is None:
        raise context.failed(grpc.StatusCode.UNIMPLEMENTED, _NO_METHOD)
    return handler


async def _answers(handler: Handler, data: bytes, context: _Context) -> AsyncIterator[bytes]:
    """The answers of a handler with a stream of them; its stream of requests, if it has one, is of one message."""
    if handler.unary_stream is not None:
        answers = handler.unary_stream(_parsed(handler, data), context)
    elif handler.stream_stream is not None:
        answers = handler.stream_stream(_one(_parsed(handler, data)), context)
    else:
        raise context.failed(grpc.StatusCode.UNIMPLEMENTED, "the method has one answer")
    async for each in answers:
        yield _encoded(handler, each)


async def _one(request: Any) -> AsyncIterator[Any]:
    yield request


async def _only(answers: AsyncIterator[bytes], context: _Context) -> bytes:
    async for answer in answers:
        return answer
    raise context.failed(grpc.StatusCode.INTERNAL, "the method has not answered")


def _parsed(handler: Handler, data: bytes) -> Any:
    return data if handler.request_deserializer is None else handler.request_deserializer(data)


def _encoded(handler: Handler, answer: Any) -> bytes:
    encode = handler.response_serializer
    encoded: bytes = answer if encode is None else encode(answer)
    return encoded
