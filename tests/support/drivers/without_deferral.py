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

from crust.rpc.call import Call, Metadata, pairs
from crust.rpc.messages import extensions
from crust.rpc.port import Port, SocketPort
from crust.rpc.status import PeerStatus

Context = grpc.aio.ServicerContext[bytes, bytes]


class _Version(grpc.GenericRpcHandler):
    """Forwards every call, as bytes, and the metadata of the opt-in if it defers."""

    def __init__(self, driver: Port, *, defers: bool) -> None:
        self._driver = driver
        self._defers = defers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def behave(data: bytes, context: Context) -> bytes:
            metadata = pairs(context.invocation_metadata())
            if not self._defers:
                metadata = _without_deferral(metadata)
            method, left_s = handler_call_details.method, context.time_remaining()
            try:
                return await self._driver.answer(Call(method, metadata, left_s), data)
            except PeerStatus as refusal:
                await context.abort(refusal.code, refusal.text, refusal.trailing)
                raise

        return grpc.unary_unary_rpc_method_handler(behave)


def _without_deferral(metadata: Metadata) -> Metadata:
    kept = []
    for key, value in metadata:
        if key != extensions.KEY or isinstance(value, bytes):
            kept.append((key, value))
            continue
        others = [name for name in value.split(",") if name.strip() != extensions.DEFERRAL]
        kept.append((key, ",".join(others)))
    return tuple(kept)


@asynccontextmanager
async def serving(driver_socket: str, socket: str, *, defers: bool = False) -> AsyncIterator[None]:
    """Serve the driver at another socket, as one that does not defer unless it is told so."""
    async with SocketPort(driver_socket) as driver:
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
