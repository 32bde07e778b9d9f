"""A service that answers with what it is sent."""

import grpc
import grpc.aio

from crust.core.supervised import Health
from crust.rpc import channel
from crust.rpc.call import Call
from crust.rpc.serving import server
from crust.rpc.serving.service import Methods, Service


async def _answer(_: object, data: bytes, __: Call) -> bytes:
    return data


def echo_service(health: Health | None = None) -> Service:
    """It answers with what it got."""
    methods = Methods({"/x/Y": _answer, "/csi.v1.Identity/Probe": _answer})
    return Service("t", methods, health=health)


async def echo(path: str, timeout: float = 60) -> bytes:
    """What the service at a path answers to "hello"."""
    async with channel.connect(path) as connected:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connected.unary_unary("/x/Y")
        return await call(b"hello", timeout=timeout)


async def start(path: str, **options: str) -> None:
    """A server whose start is to be refused."""
    async with server.serving(path, Service("t"), **options):
        raise AssertionError("it serves")
