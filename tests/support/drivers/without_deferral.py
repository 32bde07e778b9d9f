"""A driver's socket as an older version of the driver would serve it: the opt-in to deferral does not reach it.

Or as the newer version does, for a test that replaces one by the other: what is replaced ends its connections.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from crust.rpc import channel, passthrough
from crust.rpc.messages import extensions


class _Version(grpc.GenericRpcHandler):
    """Forwards every call, as bytes, and the metadata of the opt-in if it defers."""

    def __init__(self, driver: grpc.aio.Channel, *, defers: bool) -> None:
        self._driver = driver
        self._defers = defers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        peer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        peer = self._driver.unary_unary(handler_call_details.method)

        async def behave(data: bytes, context: passthrough.Context) -> bytes:
            metadata = passthrough.metadata_of(context)
            if not self._defers:
                metadata = _without_deferral(metadata)
            try:
                return await peer(data, metadata=metadata, timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                return await passthrough.relay_status(context, error)

        return grpc.unary_unary_rpc_method_handler(behave)


def _without_deferral(metadata: passthrough.Metadata) -> passthrough.Metadata:
    kept = []
    for key, value in metadata:
        if key != extensions.KEY or isinstance(value, bytes):
            kept.append((key, value))
            continue
        others = [each for each in value.split(",") if each.strip() != extensions.DEFERRAL]
        kept.append((key, ",".join(others)))
    return tuple(kept)


@asynccontextmanager
async def serving(driver_socket: str, socket: str, *, defers: bool = False) -> AsyncIterator[None]:
    """Serve the driver at another socket, as one that does not defer unless it is told so."""
    async with channel.connect(driver_socket) as driver:
        server = grpc.aio.server(handlers=[_Version(driver, defers=defers)])
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        try:
            yield
        finally:
            await server.stop(grace=1)


async def main() -> None:
    """Serve until the process is ended: the driver's socket, and the one that is served."""
    async with serving(*sys.argv[1:]):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
