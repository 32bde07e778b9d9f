"""The two layers below NRI: its multiplexer, and ttrpc, containerd's RPC. Pure functions and decoders; no I/O.

The multiplexer has several connections over one socket. A frame is a header of 8 bytes, connection and payload
length, both big-endian, then the payload. A connection is a stream of bytes: a message may end anywhere in a frame.
The engine refuses a frame with more than 4,096 bytes of payload by closing the socket, and creates the container
whose refusal was in that frame: so `frames_of` splits. The peer's frames are bounded too, by the largest message
that ttrpc has.

In a connection ttrpc has messages of one call each, in both directions. A message is a header of 10 bytes,
big-endian: length, stream, type, flags; then a protobuf message, at most 4 MiB. A stream is one call; the streams
that this side opens are odd. Crust makes only unary calls: a message of another type belongs to no call, and is
ignored.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from crust.core import errors
from crust.wire.ttrpc.v1 import ttrpc_pb2

_Part = TypeVar("_Part")

ENGINE_CALLS, PLUGIN_CALLS = 1, 2
"""The connections: the engine calls the plugin in the first, the plugin calls the engine in the second."""
REQUEST, RESPONSE = 1, 2
UNKNOWN, UNIMPLEMENTED = 2, 12
"""The codes of gRPC for a refusal, and for an unknown method."""

_FRAME_HEADER = struct.Struct(">II")
_SENT_BYTES_MAX = 4096
_HEADER = struct.Struct(">IIBB")
_LENGTH_MAX = 4 * 1024 * 1024
_TEXT_MAX = 3000
"""Characters of a refusal: with 100,000 bytes a CRI client reads "Stream removed" in its place."""


class ProtocolViolated(errors.RuntimeFailed):
    """The peer of a socket sent bytes that violate its protocol; the connection cannot be used any more."""

    def __init__(self, violation: str, why: str) -> None:
        super().__init__(f"the container engine sent {violation}", why=why)


@dataclass(frozen=True, slots=True)
class CallMessage:
    """One message: `kind` is REQUEST, RESPONSE, or a type that crust does not have."""

    stream: int
    kind: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """The status of a call that failed."""

    code: int
    text: str


@dataclass(eq=False)
class Splitter(Generic[_Part]):
    """Takes bytes as they arrive, and gives each complete part. It keeps less than one part.

    A part is a header, in which the number `_length_at` is the length, and a payload of at most `_bytes_max`.
    """

    _header: struct.Struct
    _length_at: int
    _bytes_max: int
    _made: Callable[[tuple[int, ...], bytes], _Part]
    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[_Part]:
        """The parts that are complete now. Raises ProtocolViolated."""
        self._rest += data
        parts, size = [], self._header.size
        while len(self._rest) >= size:
            numbers = self._header.unpack_from(self._rest)
            length = numbers[self._length_at]
            if length > self._bytes_max:
                raise ProtocolViolated("an impossible length", f"it would have {length} bytes")
            if len(self._rest) < size + length:
                break
            parts.append(self._made(numbers, bytes(self._rest[size : size + length])))
            del self._rest[: size + length]
        return parts


def frames_of(connection: int, data: bytes) -> bytes:
    """The frames that carry `data` on a connection."""
    parts = (data[i : i + _SENT_BYTES_MAX] for i in range(0, len(data), _SENT_BYTES_MAX))
    return b"".join(_FRAME_HEADER.pack(connection, len(part)) + part for part in parts)


def frame_splitter() -> Splitter[tuple[int, bytes]]:
    """Gives the connection and the payload of each frame."""
    bytes_max = _LENGTH_MAX + _HEADER.size
    return Splitter(_FRAME_HEADER, 1, bytes_max, lambda numbers, data: (numbers[0], data))


def message_splitter() -> Splitter[CallMessage]:
    """Gives the messages of a connection."""
    return Splitter(
        _HEADER, 0, _LENGTH_MAX, lambda numbers, data: CallMessage(numbers[1], numbers[2], data)
    )


def request(stream: int, service: str, method: str, message: Message) -> bytes:
    call = ttrpc_pb2.Request(service=service, method=method, payload=message.SerializeToString())
    return _framed(stream, REQUEST, call)


def response(stream: int, answer: Message | Failure) -> bytes:
    """The bytes of an answer; a text is cut to 3,000 characters."""
    if isinstance(answer, Failure):
        status = ttrpc_pb2.Status(code=answer.code, message=answer.text[:_TEXT_MAX])
        return _framed(stream, RESPONSE, ttrpc_pb2.Response(status=status))
    return _framed(stream, RESPONSE, ttrpc_pb2.Response(payload=answer.SerializeToString()))


def parse_request(message: CallMessage) -> ttrpc_pb2.Request:
    """The call of a message. Raises ProtocolViolated."""
    try:
        return ttrpc_pb2.Request.FromString(message.data)
    except DecodeError as err:
        raise ProtocolViolated("a call that cannot be read", str(err)) from err


def parse_response(message: CallMessage) -> bytes | Failure:
    """The answer of a call. Raises ProtocolViolated."""
    try:
        answer = ttrpc_pb2.Response.FromString(message.data)
    except DecodeError as err:
        raise ProtocolViolated("an answer that cannot be read", str(err)) from err
    return (
        Failure(answer.status.code, answer.status.message) if answer.status.code else answer.payload
    )


def _framed(stream: int, kind: int, message: Message) -> bytes:
    data = message.SerializeToString()
    return _HEADER.pack(len(data), stream, kind, 0) + data
