"""A runtime handler whose answers are too large."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc, types_pb2

UNBOUNDED = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 1 << 22),
    ("grpc.absolute_max_metadata_size", 1 << 22),
]


class Hostile(handlers_pb2_grpc.RuntimeHandlerServicer):
    """Answers with so many lines of usage, or with a text."""

    def __init__(self, *, lines: int = 0, text: str = "", condition: str = "") -> None:
        self._lines = lines
        self._text = text
        self._condition = condition

    async def GetVolumeStats(self, request: Any, context: Any) -> Any:
        if self._text:
            await context.abort(grpc.StatusCode.INTERNAL, self._text)
        line = types_pb2.VolumeUsage(unit=types_pb2.VolumeUsage.BYTES, total=1, used=1)
        one = handlers_pb2.GetVolumeStatsResponse(usage=[line]).SerializeToString()
        answer = handlers_pb2.GetVolumeStatsResponse.FromString(one * self._lines)
        if self._condition:
            answer.volume_condition.message = self._condition
        return answer


@asynccontextmanager
async def serving(path: str, hostile: Hostile) -> AsyncIterator[None]:
    server = grpc.aio.server(options=UNBOUNDED)
    handlers_pb2_grpc.add_RuntimeHandlerServicer_to_server(hostile, server)
    server.add_insecure_port(f"unix:{path}.bound")
    await server.start()
    os.rename(f"{path}.bound", path)
    try:
        yield
    finally:
        await server.stop(None)
