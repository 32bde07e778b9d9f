"""One call between two parts of a process, at its handler's side: the context that the handler sees, and its run.

The context has what crust uses of `grpc.aio.ServicerContext`, and keeps the outcome. `answer` and `pump` run the
handler of a method and raise what a caller at a socket would get: `PeerStatus`, with the code, the text and the
metadata. A method that takes more than one request, or that nobody has, is UNIMPLEMENTED.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import NoReturn, Protocol

import grpc
import grpc.aio

from crust import errors
from crust.rpc.serving.method_handlers import Handler, decoded, encoded
from crust.rpc.status import Metadata, PeerStatus, pairs

NO_METHOD = "Method not found!"
"""The text that gRPC has for a method that a server does not know."""


class NotServedYet(errors.PeerUnavailable):
    """A part of this process is not started yet, or has ended."""

    def __init__(self, method: str) -> None:
        super().__init__(
            f"{method.rpartition('/')[2]} cannot be answered",
            why="the part of this process that answers it does not run",
            hint="retry: the process is starting or stopping",
        )


class Server(Protocol):
    """Who has the handlers."""

    async def handler(self, method: str) -> Handler:
        """The handler of a method; None if there is none. Raises `NotServedYet`."""


class Context:
    """What crust uses of grpc.aio.ServicerContext, and the outcome of the call."""

    def __init__(
        self, metadata: Iterable[tuple[str, str | bytes]], timeout_s: float | None
    ) -> None:
        self._metadata = tuple(metadata)
        self.timeout_s = timeout_s
        self._ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.initial: Metadata = ()
        self.begun = asyncio.Event()
        self.trailing: Metadata = ()
        self._code = grpc.StatusCode.OK
        self._details = ""

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._ends_s is None else max(0.0, self._ends_s - time.monotonic())

    async def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        self.initial = pairs(initial_metadata)
        self.begun.set()

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

    def failed(self, code: grpc.StatusCode | None = None, details: str = "") -> PeerStatus:
        """The error that the caller gets."""
        return PeerStatus(code or self._code, details or self._details, pairs(self.trailing))


async def answer(server: Server, method: str, data: bytes, context: Context) -> bytes:
    """The answer of a method, as bytes; of a method with a stream of answers, the first one."""
    handler = await _handler(server, method, context)
    try:
        async with asyncio.timeout(context.timeout_s):
            if handler.unary_unary is None:
                return await _only(_answers(handler, data, context), context)
            answered = await handler.unary_unary(decoded(handler, data), context)
    except TimeoutError:
        raise context.failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
    except grpc.aio.AbortError:
        raise context.failed() from None
    return encoded(handler, answered)


async def stream(
    server: Server, method: str, data: bytes, context: Context
) -> AsyncGenerator[bytes, None]:
    """The answers of a method with a stream of them, as bytes."""
    handler = await _handler(server, method, context)
    try:
        async for answer in _answers(handler, data, context):
            context.begun.set()
            yield answer
    except grpc.aio.AbortError:
        raise context.failed() from None


async def _handler(server: Server, method: str, context: Context) -> Handler:
    try:
        handler = await server.handler(method) if method else None
    except NotServedYet as error:
        raise context.failed(grpc.StatusCode.UNAVAILABLE, error.shown()) from error
    if handler is None:
        raise context.failed(grpc.StatusCode.UNIMPLEMENTED, NO_METHOD)
    return handler


async def _answers(handler: Handler, data: bytes, context: Context) -> AsyncIterator[bytes]:
    """The answers of a handler with a stream of them."""
    if handler.unary_stream is None:
        raise context.failed(grpc.StatusCode.UNIMPLEMENTED, "the method has one answer")
    async for each in handler.unary_stream(decoded(handler, data), context):
        yield encoded(handler, each)


async def _only(answers: AsyncIterator[bytes], context: Context) -> bytes:
    async for answer in answers:
        return answer
    raise context.failed(grpc.StatusCode.INTERNAL, "the method has not answered")
