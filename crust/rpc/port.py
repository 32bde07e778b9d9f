"""The one way out: a call to a peer, in bytes. Its ends are a unix socket, and a part of this process (`LocalPort`).

Every call has the request id and the trace of the call that is being served, and bounds on the answer: a peer may be
hostile, because a guest speaks through its runtime handler. A refusal is raised as `PeerStatus`, unchanged but for
two: gRPC's own text about an absent peer, or about an answer that is too large, names gRPC's internals and nothing to
do; the caller gets a sentence of crust with the same code. `stub` gives a generated stub over a port, as the codec.

A socket has one channel, which is open as long as its owner runs: a new channel costs as much as several calls.
gRPC's default back-off starts at a second and grows to minutes, which is too slow for a unix socket: with the options
of `channel` a port finds a restarted process within a fraction of a second.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, cast

import grpc
import grpc.aio

from crust.core import errors, logs, traces
from crust.rpc import channel
from crust.rpc.call import Call
from crust.rpc.messages import call_fields
from crust.rpc.status import Metadata, PeerStatus, pairs

Stub = TypeVar("Stub")
Answer = TypeVar("Answer")

_READY = grpc.ChannelConnectivity.READY
_ENDED = "the connection has ended"
_TOO_LARGE = "larger than max"
"""In gRPC's text about a message that is larger than the channel allows."""

_REASONS = (
    ("No such file or directory", "there is no such socket"),
    ("Connection refused", "no process listens there any more"),
    ("Permission denied", "this user may not connect to it"),
)


@dataclass(slots=True)
class Heard:
    """The metadata that a peer sent beside its answer: before it, and after it."""

    initial: Metadata = ()
    trailing: Metadata = ()


class Answers(ABC, Generic[Answer]):
    """The answers of a call with a stream of them. Iterating raises `PeerStatus` where the peer refuses."""

    @abstractmethod
    async def initial_metadata(self) -> Metadata:
        """The metadata before the first answer; waits until the peer has begun."""

    @abstractmethod
    async def trailing_metadata(self) -> Metadata:
        """The metadata after the last answer."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the call, if it runs."""

    @abstractmethod
    async def __anext__(self) -> Answer: ...

    def __aiter__(self) -> Self:
        return self


class Port(ABC):
    """A peer that answers calls. The owner closes it."""

    @property
    @abstractmethod
    def connection(self) -> int:
        """The number of the connection that exists now, 0 without one. A later connection has another number."""

    @abstractmethod
    def is_connected(self) -> bool:
        """Whether there is a connection; if there is none, the port begins to connect."""

    @abstractmethod
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
        """The answer to a request of `method` (`/csi.v1.Node/NodeStageVolume`); `heard` takes the peer's metadata.

        Raises `PeerStatus`. `wait_for_ready`: an absent peer is waited for.
        """

    @abstractmethod
    async def forward(self, call: Call, data: bytes) -> bytes:
        """Pass on a call with one answer that is being served: request, metadata, deadline, and what comes back.

        Raises as `call`; `PeerNotResponding` a little before the caller's own deadline.
        """

    @abstractmethod
    def stream(
        self,
        method: str,
        data: bytes,
        metadata: Metadata = (),
        timeout_s: float | None = None,
        *,
        wait_for_ready: bool = False,
    ) -> Answers[bytes]:
        """The answers to a request of a method that may have any number of them."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the connection, and the calls that run."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class SocketPort(Port):
    """The end at a unix socket; it connects at the first call.

    An answer of more than `answer_max_bytes` is not read. Raises `SocketPathTooLong`, and `InvalidRequest` for a path
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
        """See `Port`."""
        if self._channel.get_state() is not _READY:
            return 0
        if self._lasts is None or self._lasts.done():
            self._number += 1
            ends = self._channel.wait_for_state_change(_READY)
            self._lasts = asyncio.create_task(ends, name=f"connection to {self._path}")
        return self._number

    def is_connected(self) -> bool:
        """See `Port`."""
        return self._channel.get_state(try_to_connect=True) is _READY

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
        peer = self._unary.get(method)
        if peer is None:
            peer = self._unary[method] = self._channel.unary_unary(method)
        running = peer(
            data,
            metadata=identified(metadata),
            timeout=timeout_s,
            wait_for_ready=wait_for_ready or None,
        )
        try:
            answer: bytes = await running
            if heard is not None:
                heard.initial = pairs(await running.initial_metadata())
                heard.trailing = pairs(await running.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            raise self.refusal(error) from None
        return answer

    async def forward(self, call: Call, data: bytes) -> bytes:
        """See `Port`."""
        timeout_s = call.time_remaining()
        if timeout_s is not None:
            timeout_s -= min(_RESERVE_S, timeout_s / 10)
        began_s, heard = time.monotonic(), Heard()
        try:
            answer = await self.call(
                call.method, data, call.invocation_metadata(), timeout_s, heard
            )
        except PeerStatus as status:
            elapsed_s = time.monotonic() - began_s
            if timeout_s is not None and _ran_out(status, elapsed_s, timeout_s):
                raise _not_responding(call.method, elapsed_s) from status
            raise
        if heard.initial:
            await call.begin(heard.initial)
        call.trailing = heard.trailing
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
        """See `Port`."""
        peer: Any = self._channel.unary_stream(method)  # not kept: a caller may choose the name
        running = peer(
            data,
            metadata=identified(metadata),
            timeout=timeout_s,
            wait_for_ready=wait_for_ready or None,
        )
        return _SocketAnswers(running, self)

    async def aclose(self) -> None:
        """See `Port`."""
        if self._lasts is not None:
            self._lasts.cancel()
            await asyncio.wait([self._lasts])
        await self._channel.close()

    def refusal(self, error: grpc.aio.AioRpcError) -> PeerStatus:
        """The peer's status; or what gRPC reports, in our words: a peer that answers is connected."""
        code, text, trailing = (
            error.code(),
            error.details() or "",
            pairs(error.trailing_metadata()),
        )
        if not trailing:
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in text:
                return PeerStatus.of(_answer_too_large(self._path))
            is_connected = self._channel.get_state() is _READY
            if code is grpc.StatusCode.UNAVAILABLE and not is_connected:
                return PeerStatus.of(_not_reachable(self._path, text))
        return PeerStatus(code, text, trailing)


class _SocketAnswers(Answers[bytes]):
    def __init__(self, running: Any, port: SocketPort) -> None:
        self._running = running
        self._port = port
        self._answers: AsyncIterator[bytes] = running.__aiter__()

    async def initial_metadata(self) -> Metadata:
        try:
            return pairs(await self._running.initial_metadata())
        except grpc.aio.AioRpcError as error:
            raise self._port.refusal(error) from None

    async def trailing_metadata(self) -> Metadata:
        return pairs(await self._running.trailing_metadata())

    async def aclose(self) -> None:
        self._running.cancel()

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._answers)
        except grpc.aio.AioRpcError as error:
            raise self._port.refusal(error) from None


_RESERVE_S = 1.0
"""Of the caller's time, a tenth of it at most: so that the caller hears the reason before its own deadline."""


def _ran_out(status: PeerStatus, elapsed_s: float, timeout_s: float) -> bool:
    """Whether our own deadline ended the call; a peer's DEADLINE_EXCEEDED that came earlier is its status."""
    return status.code is grpc.StatusCode.DEADLINE_EXCEEDED and elapsed_s >= timeout_s - 0.01


def _not_responding(method: str, elapsed_s: float) -> errors.PeerUnavailable:
    return errors.PeerUnavailable.named(
        "PeerNotResponding",
        f"{method.rpartition('/')[2]} was not answered",
        why=f"the driver or shim that it was passed on to has not answered for {elapsed_s:.1f} s",
        hint="look at that process, its log, and the storage behind it; the caller may retry",
    )


def _not_reachable(path: str, text: str) -> errors.PeerUnavailable:
    return errors.PeerUnavailable.named(
        "PeerNotReachable",
        f"the process that serves {path} cannot be reached",
        why=next((why for words, why in _REASONS if words in text), _ENDED),
        hint="start it, and look at its log; as root, if this user may not connect",
    )


def _answer_too_large(path: str) -> errors.Exhausted:
    return errors.Exhausted.named(
        "AnswerTooLarge",
        f"an answer of the process that serves {path} was not read",
        why="it is larger than any answer of this kind of process may be",
        hint="look at that process and its log",
    )


def stub(kind: Callable[[grpc.aio.Channel], Stub], port: Port) -> Stub:
    """A generated stub whose calls go through the port: its methods take `metadata`, `timeout` in s, `heard` and
    `wait_for_ready`, and have an answer to await, or `Answers`.
    """
    return kind(cast("grpc.aio.Channel", _Codec(port)))


class _Codec:
    """What a generated stub asks of a channel: a callable for each method, from message to message."""

    def __init__(self, port: Port) -> None:
        self._port = port

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Any:
        async def call(
            request: Any,
            *,
            metadata: Metadata = (),
            timeout: float | None = None,
            heard: Heard | None = None,
            wait_for_ready: bool = False,
        ) -> Any:
            data = request_serializer(request)
            answer = await self._port.call(
                method, data, metadata, timeout, heard, wait_for_ready=wait_for_ready
            )
            return response_deserializer(answer)

        return call

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Any:
        def call(
            request: Any,
            *,
            metadata: Metadata = (),
            timeout: float | None = None,
            wait_for_ready: bool = False,
        ) -> Answers[Any]:
            data = request_serializer(request)
            answers = self._port.stream(
                method, data, metadata, timeout, wait_for_ready=wait_for_ready
            )
            return _Decoded(answers, response_deserializer)

        return call


class _Decoded(Answers[Any]):
    def __init__(self, answers: Answers[bytes], decode: Callable[[bytes], Any]) -> None:
        self._answers = answers
        self._decode = decode

    async def initial_metadata(self) -> Metadata:
        return await self._answers.initial_metadata()

    async def trailing_metadata(self) -> Metadata:
        return await self._answers.trailing_metadata()

    async def aclose(self) -> None:
        await self._answers.aclose()

    async def __anext__(self) -> Any:
        return self._decode(await anext(self._answers))


def volume_metadata() -> Metadata:
    """Which volume the call is about that is being served, for a peer that only gets its target."""
    fields = logs.context.get() or {}
    if "volume_id" not in fields:
        return ()
    named = f"{fields.get('driver', '')}\0{fields['volume_id']}"
    return ((call_fields.VOLUME_KEY, named.encode()),)


def identified(metadata: Metadata) -> Metadata:
    """The metadata with the id and the span of the call that is being served; as it is outside of a call."""
    fields = logs.context.get()
    if fields is None or "request_id" not in fields:
        return metadata
    own = {call_fields.ID_KEY: fields["request_id"]}
    if span := traces.traceparent():
        own[traces.KEY] = span
    kept = (pair for pair in metadata if pair[0] not in own)
    return (*kept, *own.items())
