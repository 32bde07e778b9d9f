"""ttrpc, containerd's RPC: messages of one call each, in both directions. Pure functions and a decoder; no I/O.

A message is a header of 10 bytes, big-endian: length, stream, type, flags; then a protobuf message, at most 4 MiB. A
stream is one call; the streams that this side opens are odd. Crust makes only unary calls: a message of another type
belongs to no call, and is ignored.
"""

import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from crust.kata.mux import ProtocolViolated, Splitter
from crust.wire.ttrpc.v1 import ttrpc_pb2

REQUEST, RESPONSE = 1, 2
UNKNOWN, UNIMPLEMENTED = 2, 12
"""The codes of gRPC for a refusal, and for an unknown method."""

LENGTH_MAX = 4 * 1024 * 1024
_HEADER = struct.Struct(">IIBB")
_TEXT_MAX = 3000
"""Characters of a refusal: with 100,000 bytes a CRI client reads "Stream removed" in its place."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: `kind` is REQUEST, RESPONSE, or a type that crust does not have."""

    stream: int
    kind: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """The status of a call that failed."""

    code: int
    text: str


def decoder() -> Splitter[Frame]:
    """Gives the messages of a connection."""
    return Splitter(
        _HEADER, 0, LENGTH_MAX, lambda numbers, data: Frame(numbers[1], numbers[2], data)
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


def parse_request(frame: Frame) -> ttrpc_pb2.Request:
    """The call of a message. Raises ProtocolViolated."""
    try:
        return ttrpc_pb2.Request.FromString(frame.data)
    except DecodeError as err:
        raise ProtocolViolated("a call that cannot be read", str(err)) from err


def parse_response(frame: Frame) -> bytes | Failure:
    """The answer of a call. Raises ProtocolViolated."""
    try:
        answer = ttrpc_pb2.Response.FromString(frame.data)
    except DecodeError as err:
        raise ProtocolViolated("an answer that cannot be read", str(err)) from err
    return (
        Failure(answer.status.code, answer.status.message) if answer.status.code else answer.payload
    )


def _framed(stream: int, kind: int, message: Message) -> bytes:
    data = message.SerializeToString()
    return _HEADER.pack(len(data), stream, kind, 0) + data
