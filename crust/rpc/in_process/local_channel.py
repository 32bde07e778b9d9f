"""The channel to a server of the same process: what crust uses of `grpc.aio.Channel`, and its two kinds of calls.

A call with one answer runs in the task that awaits it. One with a stream of answers has a task of its own, because
its reader may be slow. A call that is left ends its handler, as at a socket.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from crust import logs
from crust.rpc.in_process import local_calls
from crust.rpc.in_process.local_calls import Context, Metadata, Server

_Serialize = Callable[[Any], bytes] | None
_Parse = Callable[[bytes], Any] | None


class Channel:
    """What crust uses of grpc.aio.Channel. It is always connected."""

    def __init__(self, server: Server) -> None:
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
            context = Context(metadata or (), timeout)
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
            context = Context(metadata or (), timeout)
            return _StreamCall(self.server, method, data, context, response_deserializer)

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

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _UnaryCall:
    """A call with one answer, which one task awaits: it runs there, from the first await on."""

    def __init__(
        self, server: Server, method: str, data: bytes, context: Context, parse: _Parse
    ) -> None:
        self._begin = partial(local_calls.answer, server, method, data, context)
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
        self, server: Server, method: str, data: bytes, context: Context, parse: _Parse
    ) -> None:
        self._context = context
        self._begun = asyncio.Event()
        context.on_initial = self._begun.set
        self._answers: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        pumped = local_calls.pump(server, method, data, context, self._answers)
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
