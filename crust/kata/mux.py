"""NRI's multiplexer: several connections over one socket. Pure functions and a decoder; no I/O.

A frame is a header of 8 bytes, connection and payload length, both big-endian, then the payload. A connection is a
stream of bytes: a message may end anywhere in a frame. The engine refuses a frame with more than 4,096 bytes
of payload by closing the socket, and creates the container whose refusal was in that frame: so `encode` splits.
The peer's frames are bounded too, by the largest message that ttrpc has.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from crust.core import errors

_Part = TypeVar("_Part")

ENGINE_CALLS, PLUGIN_CALLS = 1, 2
"""The connections: the engine calls the plugin in the first, the plugin calls the engine in the second."""

_HEADER = struct.Struct(">II")
_SENT_BYTES_MAX = 4096
_READ_BYTES_MAX = 4 * 1024 * 1024 + 10


class ProtocolViolated(errors.RuntimeFailed):
    """The peer of a socket sent bytes that violate its protocol; the connection cannot be used any more."""

    def __init__(self, violation: str, why: str) -> None:
        super().__init__(f"the container engine sent {violation}", why=why)


def encode(connection: int, data: bytes) -> bytes:
    """The frames that carry `data` on a connection."""
    parts = (data[i : i + _SENT_BYTES_MAX] for i in range(0, len(data), _SENT_BYTES_MAX))
    return b"".join(_HEADER.pack(connection, len(part)) + part for part in parts)


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


def decoder() -> Splitter[tuple[int, bytes]]:
    """Gives the connection and the payload of each frame."""
    return Splitter(_HEADER, 1, _READ_BYTES_MAX, lambda numbers, data: (numbers[0], data))
