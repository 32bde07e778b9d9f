"""The only way to call a peer, in bytes: over a unix socket, or in this process (`serving.server`).

Every call has the request id and the trace of the served call, and bounds on the answer: a peer may be hostile,
because a guest speaks through its runtime handler. A port raises a refusal unchanged, as `PeerStatus`, with two
exceptions: gRPC's own text about an absent peer or a too large answer names gRPC's internals and no remedy, so the
caller gets a sentence of crust with the same code. `stub` gives a generated stub over a port, as the codec.

A socket has one channel, which is open as long as its owner runs: a new channel costs as much as several calls.
gRPC's default back-off grows from a second to minutes, which is too slow for a unix socket: with the options of
`channel` a port finds a restarted process within a fraction of a second.
"""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from crust.core import errors
from crust.rpc import channel, status
from crust.rpc.call import Call, identified, pairs
from crust.rpc.status import PeerStatus

Stub = TypeVar("Stub")
T = TypeVar("T")

_READY = grpc.ChannelConnectivity.READY
_RESERVE_S = 1.0
"""Kept of the caller's time, a tenth at most: so the caller hears the reason before its own deadline."""
_TOO_LARGE = "larger than max"
"""In gRPC's text about a message that is larger than the channel allows."""

_REASONS = (
    ("No such file or directory", "there is no such socket"),
    ("Connection refused", "no process listens there any more"),
    ("Permission denied", "this user may not connect to it"),
)


class PeerNotReachable(errors.PeerUnavailable):
    """No process serves a socket. A peer of crust passes the name on, so its caller knows whose socket it is."""


class Port(ABC):
    """A peer that answers calls. The owner closes it."""

    @property
    @abstractmethod
    def connection(self) -> int:
        """The number of the connection that exists now, 0 without one. A later connection has another number."""

    @abstractmethod
    def is_connected(self) -> bool:
        """Whether there is a connection; if not, the port begins to connect, and may refuse a call meanwhile."""

    @abstractmethod
    async def answer(self, call: Call, data: bytes) -> bytes:
        """The answer to a request; the call gets the metadata that came with it. Raises `PeerStatus`."""

    @abstractmethod
    async def forward(self, call: Call, data: bytes) -> bytes:
        """As `answer`, for the served call; `PeerNotResponding` a little before the caller's deadline."""

    @abstractmethod
    def stream(self, call: Call, data: bytes) -> AsyncGenerator[bytes, None]:
        """The answers to a request of a method that may have any number of them. Raises `PeerStatus`."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the connection, and the calls that run."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class SocketPort(Port):
    """The end at a unix socket; it connects at the first call.

    It reads no answer of more than `answer_max_bytes`. Raises `SocketPathTooLong`, and `InvalidRequest` for a path
    that is not absolute.
    """

    def __init__(
        self, socket_path: str, *, answer_max_bytes: int = channel.MESSAGE_MAX_BYTES
    ) -> None:
        self._path = socket_path
        self._channel = channel.connect(socket_path, answer_max_bytes=answer_max_bytes)
        self._unary: dict[str, Any] = {}
        self._number = 0
        self._lasts: asyncio.Task[None] | None = None

    @property
    def connection(self) -> int:
        if self._channel.get_state() is not _READY:
            return 0
        if self._lasts is None or self._lasts.done():
            self._number += 1
            ends = self._channel.wait_for_state_change(_READY)
            self._lasts = asyncio.create_task(ends, name=f"connection to {self._path}")
        return self._number

    def is_connected(self) -> bool:
        return self._channel.get_state(try_to_connect=True) is _READY

    async def answer(self, call: Call, data: bytes) -> bytes:
        peer = self._unary.get(call.method)
        if peer is None:
            peer = self._unary[call.method] = self._channel.unary_unary(call.method)
        running = peer(
            data,
            metadata=identified(call.metadata),
            timeout=call.time_remaining(),
            wait_for_ready=call.wait_for_ready or None,
        )
        try:
            answer: bytes = await running
            initial = pairs(await running.initial_metadata())
            call.trailing = pairs(await running.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            raise self._refusal(error) from None
        if initial:
            await call.begin(initial)
        return answer

    async def forward(self, call: Call, data: bytes) -> bytes:
        timeout_s = call.time_remaining()
        if timeout_s is not None:
            timeout_s -= min(_RESERVE_S, timeout_s / 10)
        onward = Call(call.method, call.metadata, timeout_s, call.begin)
        began_s = time.monotonic()
        try:
            answer = await self.answer(onward, data)
        except PeerStatus as status:
            elapsed_s = time.monotonic() - began_s
            is_late = timeout_s is not None and elapsed_s >= timeout_s - 0.01
            # an earlier DEADLINE_EXCEEDED is the peer's own status
            if is_late and status.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise errors.PeerUnavailable.named(
                    "PeerNotResponding",
                    f"{call.method.rpartition('/')[2]} was not answered",
                    why=f"the driver or shim behind this process has not answered for {elapsed_s:.1f} s",
                ) from status
            raise
        call.trailing = onward.trailing
        return answer

    async def stream(self, call: Call, data: bytes) -> AsyncGenerator[bytes, None]:
        # not kept: a caller may choose the name
        peer: Any = self._channel.unary_stream(call.method)
        running = peer(
            data,
            metadata=identified(call.metadata),
            timeout=call.time_remaining(),
            wait_for_ready=call.wait_for_ready or None,
        )
        try:
            await call.begin(pairs(await running.initial_metadata()))
            async for answer in running:
                yield answer
            call.trailing = pairs(await running.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            raise self._refusal(error) from None
        finally:
            running.cancel()

    async def aclose(self) -> None:
        if self._lasts is not None:
            self._lasts.cancel()
            await asyncio.wait([self._lasts])
        await self._channel.close()

    def _refusal(self, refused: grpc.aio.AioRpcError) -> PeerStatus:
        """The peer's status, or gRPC's own report in a sentence of crust: a peer that answers is connected."""
        code, text = refused.code(), refused.details() or ""
        trailing = pairs(refused.trailing_metadata())
        error: errors.CrustError | None = None
        if not trailing and code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in text:
            error = errors.Exhausted.named(
                "AnswerTooLarge",
                f"an answer of the process that serves {self._path} was not read",
                why="it is larger than the limit for this kind of process",
            )
        is_connected = self._channel.get_state() is _READY
        if not trailing and code is grpc.StatusCode.UNAVAILABLE and not is_connected:
            reasons = (why for words, why in _REASONS if words in text)
            what = f"the process that serves {self._path} cannot be reached"
            error = PeerNotReachable(what, why=next(reasons, "the connection has ended"))
        return PeerStatus.of(error) if error is not None else PeerStatus(code, text, trailing)


def decoded(read: Callable[[bytes], T], answer: bytes, method: str) -> T:
    """The answer to a call, as `read` decodes it. Raises `PeerStatus`: what the peer has done is not known then."""
    try:
        return read(answer)
    except DecodeError as error:
        unreadable = errors.PeerUnavailable.named(
            "AnswerUnreadable",
            f"the answer to {method.rpartition('/')[2]} cannot be read",
            why=f"it is no message of that call: {error}",
        )
        raise PeerStatus.of(unreadable) from error


def stub(
    kind: Callable[[grpc.aio.Channel], Stub], port: Port, *, raises_errors: bool = False
) -> Stub:
    """A generated stub over the port. Its methods take the arguments of a `Call` and return an awaitable answer, or a
    generator of answers.

    With `raises_errors` a method of one answer raises the error that a peer of crust answered with.
    """
    return kind(cast("grpc.aio.Channel", _Codec(port, raises_errors)))


@dataclass(frozen=True, slots=True)
class _Codec:
    """The part of a channel that a generated stub uses: a callable for each method, from message to message."""

    port: Port
    raises_errors: bool

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Any:
        async def ask(request: Any, **arguments: Any) -> Any:
            call = Call(method, **arguments)
            try:
                answer = await self.port.answer(call, request_serializer(request))
                return decoded(response_deserializer, answer, method)
            except PeerStatus as refusal:
                if not self.raises_errors:
                    raise
                raise status.to_error(refusal) from refusal

        return ask

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Any:
        async def ask(request: Any, **arguments: Any) -> AsyncGenerator[Any, None]:
            stream = self.port.stream(Call(method, **arguments), request_serializer(request))
            async with contextlib.aclosing(stream) as answers:
                async for answer in answers:
                    yield decoded(response_deserializer, answer, method)

        return ask
