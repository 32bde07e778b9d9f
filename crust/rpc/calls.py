"""What every call of crust to a peer has: request id and trace in its metadata, bounds, our words for an absent peer.

gRPC's own text names its internals, a status code that is not the call's, and nothing to do. It is replaced here, at
the one place where all calls begin, and keeps its code: whoever gets the status, passes it on or logs it, has our
sentence and its name. Only what gRPC itself reports is replaced: a peer that answers is connected.

A peer may be hostile: a guest speaks through its runtime handler. Its answer has a limit, which is the channel's, and
the text of its status is cut here, before anything looks at it.

This is not an interceptor of gRPC: each of those costs a task per call.
"""

from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc
import grpc.aio

from crust import errors, logs, traces
from crust.rpc.messages import call_fields

_ENDED = "the connection has ended"
_TOO_LARGE = "larger than max"
"""In gRPC's text about a message that is larger than the channel allows."""

_REASONS = (
    ("No such file or directory", "there is no such socket"),
    ("Connection refused", "no process listens there any more"),
    ("Permission denied", "this user may not connect to it"),
)


STATUS_MAX_BYTES = 64 << 10
"""Of a peer's status text: as much as passes on unchanged (D-24)."""


class StatusOfGrpc(grpc.aio.AioRpcError):
    """A status that gRPC itself made, because the peer is away or answers too much, in our words."""

    def __init__(self, status: grpc.aio.AioRpcError, error: errors.CrustError) -> None:
        super().__init__(
            status.code(),
            status.initial_metadata(),
            status.trailing_metadata(),
            error.shown(),
            status.debug_error_string(),
        )
        self.error = error


def through(channel: grpc.aio.Channel, socket_path: str) -> grpc.aio.Channel:
    """The channel, whose calls are as above."""
    for kind in ("unary_unary", "unary_stream"):
        setattr(channel, kind, _calls(channel, getattr(channel, kind), socket_path))
    return channel


def _calls(
    channel: grpc.aio.Channel, make: Callable[..., Any], socket_path: str
) -> Callable[..., Callable[..., Any]]:
    def method(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        call = make(*args, **kwargs)

        def begin(*requests: Any, metadata: Any = None, **options: Any) -> _Call:
            return _Call(
                call(*requests, metadata=identified(metadata), **options), channel, socket_path
            )

        return begin

    return method


def volume_metadata() -> tuple[tuple[str, bytes], ...]:
    """Which volume the call is about that is being served, for a peer that only gets its target."""
    fields = logs.context.get() or {}
    if "volume_id" not in fields:
        return ()
    named = f"{fields.get('driver', '')}\0{fields['volume_id']}"
    return ((call_fields.VOLUME_KEY, named.encode()),)


def identified(metadata: Any) -> Any:
    """The metadata with the id and the span of the call that is being served; as it is outside of a call."""
    fields = logs.context.get()
    if fields is None or "request_id" not in fields:
        return metadata
    own = {call_fields.ID_KEY: fields["request_id"]}
    if span := traces.traceparent():
        own[traces.KEY] = span
    kept = (pair for pair in metadata or () if pair[0] not in own)
    return (*kept, *own.items())


class _Call:
    """A call of gRPC, of which only the errors are others."""

    def __init__(self, call: Any, channel: grpc.aio.Channel, socket_path: str) -> None:
        self._call = call
        self._channel = channel
        self._socket_path = socket_path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self._call.__await__())
        except grpc.aio.AioRpcError as error:
            raise self._worded(error) from None

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for each in self._call:
                yield each
        except grpc.aio.AioRpcError as error:
            raise self._worded(error) from None

    async def read(self) -> Any:
        """As gRPC has it."""
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._worded(error) from None

    def _worded(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        text, code = _cut(error.details() or ""), error.code()
        if not error.trailing_metadata():
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in text:
                return StatusOfGrpc(error, _answer_too_large(self._socket_path))
            is_connected = self._channel.get_state() is grpc.ChannelConnectivity.READY
            if code is grpc.StatusCode.UNAVAILABLE and not is_connected:
                why = next((why for words, why in _REASONS if words in text), _ENDED)
                return StatusOfGrpc(
                    error,
                    errors.PeerUnavailable.named(
                        "PeerNotReachable",
                        f"the process that serves {self._socket_path} cannot be reached",
                        why=why,
                        hint="start it, and look at its log; as root, if this user may not connect",
                    ),
                )
        if text == (error.details() or ""):
            return error
        return grpc.aio.AioRpcError(
            code, error.initial_metadata(), error.trailing_metadata(), text, ""
        )


def _cut(text: str) -> str:
    if len(text) <= STATUS_MAX_BYTES // 4:  # as many bytes at most
        return text
    return text.encode()[:STATUS_MAX_BYTES].decode("utf-8", "ignore")


def _answer_too_large(socket_path: str) -> errors.Exhausted:
    return errors.Exhausted.named(
        "AnswerTooLarge",
        f"an answer of the process that serves {socket_path} was not read",
        why="it is larger than any answer of this kind of process may be",
        hint="look at that process and its log",
    )
