"""A driver's socket as an older version of the driver would serve it: the opt-in to deferral does not reach it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from crust.csi_shim import inner
from crust.rpc import channel, passthrough


class _Older(grpc.GenericRpcHandler):
    """Forwards every call, as bytes, without the metadata of the opt-in."""

    def __init__(self, driver: grpc.aio.Channel) -> None:
        self._driver = driver

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        peer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        peer = self._driver.unary_unary(handler_call_details.method)

        async def behave(data: bytes, context: passthrough.Context) -> bytes:
            metadata = inner.plain(passthrough.metadata_of(context))
            try:
                return await peer(data, metadata=metadata, timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                return await passthrough.relay_status(context, error)

        return grpc.unary_unary_rpc_method_handler(behave)


@asynccontextmanager
async def serving(driver_socket: str, socket: str) -> AsyncIterator[None]:
    """Serve the driver at another socket, as one that does not defer."""
    async with channel.connect(driver_socket) as driver:
        server = grpc.aio.server(handlers=[_Older(driver)])
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        try:
            yield
        finally:
            await server.stop(grace=1)
