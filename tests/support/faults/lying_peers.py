"""Peers that lie: a relay stands between two parts, and one question that passes it gets no true answer.

A relay forwards calls of gRPC as bytes, and counts them. From the question of the lie on, the peer is not there any
more: nothing listens, its queue of connections is full, another program answers. Or that question alone is never
answered, or its answer is lost, or is no message. `restore` ends the lie, and the connections that were made until
then: a part asks again what it asks once per connection.
"""

import asyncio
import contextlib
import enum
import errno
import os
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, cast

import grpc
import grpc.aio

from crust.rpc import channel
from crust.rpc.call import Call, pairs
from crust.rpc.port import SocketPort
from crust.rpc.status import PeerStatus

Context = grpc.aio.ServicerContext[bytes, bytes]


class Way(enum.Enum):
    """How a peer lies."""

    REFUSED = "nothing listens there"
    FULL = "its queue of connections is full"
    GARBAGE = "another program answers, in no protocol"
    HANGS = "it takes the question, and never answers"
    NONSENSE = "it has done what was asked, and its answer is no message"
    LOST = "it has done what was asked, and its answer is lost"

    @property
    def is_away(self) -> bool:
        """Whether the peer is not there for each later question, too."""
        return self in (Way.REFUSED, Way.FULL, Way.GARBAGE)


@dataclass(frozen=True, slots=True)
class Lie:
    """The question that gets no true answer, by its number from 0."""

    number: int
    way: Way


_GARBAGE = b"\x00\xffno protocol\r\n" * 64
_NO_MESSAGE = b"\xff"
"""A field that does not end."""


class Relay(grpc.GenericRpcHandler):
    """Serves `path`, for the peer at `real`."""

    def __init__(self, path: str, real: str) -> None:
        self.path = path
        self._real = SocketPort(real)
        self._server: grpc.aio.Server | None = None
        self._stands_in = contextlib.ExitStack()
        self._turn: asyncio.Task[None] | None = None
        self._lie: Lie | None = None
        self.asked: list[str] = []
        """The methods of the questions since `restore`."""
        self.without_deadline: set[str] = set()
        """The methods whose callers would have waited without end."""
        self.hangs = asyncio.Event()
        """A question will never be answered."""

    async def restore(self, lie: Lie | None = None) -> None:
        """Tell the truth from now on, or this lie, to new connections."""
        self._lie = None  # a question under way begins no turn: it would end the next server
        if self._turn is not None:
            await self._turn
        await self._end()
        self._stands_in.close()
        self._lie, self._turn = lie, None
        self.asked.clear()
        self.hangs.clear()
        if lie is not None and lie.number == 0 and lie.way.is_away:
            await self._turn_into(lie.way)
        else:
            await self._serve()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """A method of any name; one that is called Register may have many answers."""
        method = handler_call_details.method

        async def answer(data: bytes, context: Context) -> bytes:
            return await self._answer(self._asked(method, context), data, context)

        async def stream(data: bytes, context: Context) -> AsyncGenerator[bytes, None]:
            call = self._asked(method, context)
            lie = self._told()
            if lie is not None and lie.way in (Way.HANGS, Way.LOST):
                await self._tell(lie)
            elif lie is not None and lie.way is Way.NONSENSE:
                yield _NO_MESSAGE
            try:
                async with contextlib.aclosing(self._real.stream(call, data)) as answers:
                    async for part in answers:
                        yield part
            except PeerStatus as refusal:
                await context.abort(refusal.code, refusal.text, refusal.trailing)

        if method.endswith("/Register"):
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(answer)

    def _asked(self, method: str, context: Context) -> Call:
        self.asked.append(method.rpartition("/")[2])
        left_s = context.time_remaining()
        if left_s is None and not method.endswith("/Register"):
            self.without_deadline.add(method)
        lie = self._lie
        if lie is not None and lie.way.is_away and lie.number == len(self.asked):
            self._watch_end(context, lie)
        return Call(method, pairs(context.invocation_metadata()), left_s)

    def _told(self) -> Lie | None:
        """The lie to the question that was asked last."""
        lie = self._lie
        return lie if lie is not None and lie.number == len(self.asked) - 1 else None

    async def _answer(self, call: Call, data: bytes, context: Context) -> bytes:
        lie = self._told()
        if lie is not None and lie.way is Way.HANGS:
            await self._tell(lie)
        try:
            answer = await self._real.answer(call, data)
        except PeerStatus as refusal:
            await context.abort(refusal.code, refusal.text, refusal.trailing)
            raise
        if lie is not None and lie.way is Way.LOST:
            await self._tell(lie)
        context.set_trailing_metadata(call.trailing)
        return _NO_MESSAGE if lie is not None and lie.way is Way.NONSENSE else answer

    async def _tell(self, lie: Lie) -> None:
        """Never return: the connection ends with this server."""
        if lie.way is Way.HANGS:
            self.hangs.set()
        else:
            self._begin_turn(lie, Way.REFUSED)
        await asyncio.Event().wait()

    def _watch_end(self, context: Context, lie: Lie) -> None:
        """Turn when the answer has gone."""

        def answered(ctx: Context) -> None:
            self._begin_turn(lie, lie.way)

        context.add_done_callback(answered)  # type: ignore[arg-type]  # the stubs' own class

    def _begin_turn(self, lie: Lie, way: Way) -> None:
        if self._lie is lie and self._turn is None:
            self._turn = asyncio.create_task(self._turn_into(way))

    async def _turn_into(self, way: Way) -> None:
        """End as a process does, and have another peer at the path."""
        await self._end()
        listener = self._stands_in.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(self.path)
        if way is Way.FULL:
            fill(self.path, listener, self._stands_in)
        elif way is Way.GARBAGE:
            loop = asyncio.get_running_loop()
            babbling = await loop.create_unix_server(_Babbler, sock=listener)
            self._stands_in.callback(babbling.close)

    async def _serve(self) -> None:
        self._server = grpc.aio.server(handlers=[self], options=channel.SERVER_OPTIONS)
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()

    async def _end(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    async def __aenter__(self) -> Self:
        await self._serve()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.restore()
        await self._end()
        await self._real.aclose()


class _Babbler(asyncio.Protocol):
    """No task of its own: one that the end of a test cancels would leave its connection open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(_GARBAGE)
        transport.close()


def fill(path: str, listener: socket.socket, waiting: contextlib.ExitStack) -> None:
    """Have the listener's queue full of connections until the stack is closed."""
    listener.listen(0)
    while True:
        line = waiting.enter_context(socket.socket(socket.AF_UNIX))
        line.settimeout(0)
        try:
            line.connect(path)
        except BlockingIOError:
            return


@contextlib.contextmanager
def standing_in(path: str, way: Way, *, nonsense: bytes = _NO_MESSAGE) -> Iterator[None]:
    """Another peer has the path while the block runs, the same in all its answers; then the real one has it again."""
    os.rename(path, f"{path}.real")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        if way is Way.FULL:
            fill(path, listener, stack)
        elif way is not Way.REFUSED:
            listener.listen()
            if way is not Way.HANGS:
                answer = {Way.LOST: b"", Way.NONSENSE: nonsense, Way.GARBAGE: _GARBAGE}[way]
                thread = threading.Thread(target=_answer_all, args=(listener, answer))
                thread.start()
                stack.callback(thread.join)
                stack.callback(listener.shutdown, socket.SHUT_RDWR)
        yield
    os.rename(f"{path}.real", path)


def _answer_all(listener: socket.socket, answer: bytes) -> None:
    """Answer each connection, and end it, until the listener is shut down."""
    while True:
        try:
            line, _ = listener.accept()
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            return
        with line, contextlib.suppress(BrokenPipeError):
            line.sendall(answer)


@asynccontextmanager
async def relayed(paths: Mapping[str, tuple[str, str]]) -> AsyncIterator[dict[str, Relay]]:
    """Relays by name, each with its path and the real one, while the block runs."""
    async with contextlib.AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(Relay(*pair)) for name, pair in paths.items()}
