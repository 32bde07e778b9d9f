"""NRI's multiplexer: several connections over one socket. Pure functions and a decoder; no I/O.

A frame is a header of 8 bytes, connection and payload length, both big-endian, then the payload. A connection is a
stream of bytes: where a frame ends says nothing about messages. The engine refuses a frame with more than 4,096 bytes
of payload by closing the socket, and a container whose refusal was in that frame is created: so `encode` splits.
The peer's frames are bounded too, by the largest message that ttrpc has.
"""

import struct

from crust.core import errors

ENGINE_CALLS, PLUGIN_CALLS = 1, 2
"""The connections: the engine calls the plugin in the first, the plugin calls the engine in the second."""

_HEADER = struct.Struct(">II")
_SENT_BYTES_MAX = 4096
_READ_BYTES_MAX = 4 * 1024 * 1024 + 10


class ProtocolViolated(errors.RuntimeFailed):
    """The peer of a socket sent bytes that its protocol does not have; the connection is of no use any more."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(
            f"the container engine sent {what}",
            why=why,
            hint="check that the NRI socket is containerd's or CRI-O's; the plugin connects again",
        )


def encode(connection: int, data: bytes) -> bytes:
    """The frames that carry `data` on a connection."""
    parts = (data[at : at + _SENT_BYTES_MAX] for at in range(0, len(data), _SENT_BYTES_MAX))
    return b"".join(_HEADER.pack(connection, len(part)) + part for part in parts)


class Decoder:
    """Takes bytes as they arrive, and gives payloads. It keeps less than one frame."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The connection and the payload of each frame that is complete now. Raises ProtocolViolated."""
        self._rest += data
        frames = []
        while len(self._rest) >= _HEADER.size:
            connection, length = _HEADER.unpack_from(self._rest)
            if length > _READ_BYTES_MAX:
                raise ProtocolViolated(
                    "an impossible frame", f"its payload would have {length} bytes"
                )
            end = _HEADER.size + length
            if len(self._rest) < end:
                break
            frames.append((connection, bytes(self._rest[_HEADER.size : end])))
            del self._rest[:end]
        return frames
