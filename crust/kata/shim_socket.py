"""The HTTP socket that the shims of both of Kata's runtimes have, and the check of a guest's numbers."""

import asyncio

from crust.core import volumes
from crust.core.printable import printable
from crust.wire.kata.v1 import agent_pb2

ANSWER_S = 70.0
"""How long a request may take: the shim's own limit is a minute."""
_ANSWER_BYTES = 64 * 1024
_USAGES_MAX = 8
_UNITS = {
    agent_pb2.VolumeUsage.BYTES: volumes.UsageUnit.BYTES,
    agent_pb2.VolumeUsage.INODES: volumes.UsageUnit.INODES,
}


async def get(socket: str, path: str) -> bytes:
    """The body of a GET by HTTP on a unix socket. Raises OSError and ValueError, with the guest's text escaped."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: shim\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read(_ANSWER_BYTES)
        while len(answer) < _ANSWER_BYTES and (part := await reader.read(_ANSWER_BYTES)):
            answer += part
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        text = printable(body[:300].decode(errors="replace"))
        raise ValueError(text or "an answer that is not HTTP")
    return body


def stats(answer: agent_pb2.VolumeStatsResponse) -> volumes.VolumeStats:
    """The numbers of a guest. Raises ValueError for impossible numbers, and without a number of bytes."""
    if len(answer.usage) > _USAGES_MAX or any(
        max(line.total, line.used, line.available) >= 2**63 for line in answer.usage
    ):
        raise ValueError("an answer with impossible numbers")
    usage = tuple(
        volumes.VolumeUsage(_UNITS[line.unit], line.total, line.used, line.available)
        for line in answer.usage
        if line.unit in _UNITS
    )
    if not any(line.unit is volumes.UsageUnit.BYTES for line in usage):
        raise ValueError("an answer without a number of bytes")
    return volumes.VolumeStats(usage)
