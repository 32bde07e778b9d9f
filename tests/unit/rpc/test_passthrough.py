"""Pass-through calls: bytes arrive unchanged, whatever the method."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.rpc import channel
from crust.rpc.call import Call
from crust.rpc.port import SocketPort
from crust.rpc.serving import server
from crust.rpc.serving.service import Methods, Service
from tests.support.drivers.fake_driver import Gate
from tests.support.faults.refusals import refused, refused_in_time, repeated, until

Context = grpc.aio.ServicerContext[bytes, bytes]
UNARY = "/csi.v1.Node/NodeStageVolume"
"""In the descriptors, so it takes the unary path."""
UNKNOWN = "/csi.v9.Future/DoIt"
"""Not in the descriptors, so it travels as a stream."""
METHODS = pytest.mark.parametrize("method", [UNARY, UNKNOWN])


class Backend(grpc.GenericRpcHandler):
    """Behaves as a test sets it; records what it received."""

    def __init__(self) -> None:
        self.unary: Callable[[bytes, Context], Awaitable[bytes]] = self._echo
        self.methods: list[str] = []
        self.requests: list[bytes] = []
        self.metadata: dict[str, Any] = {}
        self.time_left_s: float | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        self.methods.append(handler_call_details.method)
        if handler_call_details.method.endswith("Stream"):
            return grpc.unary_stream_rpc_method_handler(self._double)
        return grpc.unary_unary_rpc_method_handler(self._serve)

    async def _serve(self, request: bytes, context: Context) -> bytes:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata() or ())
        self.time_left_s = context.time_remaining()
        return await self.unary(request, context)

    async def _echo(self, request: bytes, context: Context) -> bytes:
        return request

    async def _double(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        yield request
        yield request.upper()


class Chain:
    """A caller, a pass-through server, and a backend that may serve behind it."""

    def __init__(self, root: str) -> None:
        self.front, self.back = f"{root}/front.sock", f"{root}/back.sock"
        self.backend = Backend()
        self.caller: grpc.aio.Channel = channel.connect(self.front)
        self.onwards = SocketPort(self.back)
        self.service = Service("t", others=self.onwards)

    def call(self, method: str) -> "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]":
        return self.caller.unary_unary(method)

    @asynccontextmanager
    async def serving(self, *backends: Backend) -> AsyncIterator[None]:
        """A server behind the pass-through one; without a backend it knows no method."""
        plain = grpc.aio.server(options=channel.OPTIONS)
        plain.add_generic_rpc_handlers(backends)
        plain.add_insecure_port(f"unix:{self.back}")
        await plain.start()
        yield
        await plain.stop(grace=None)


@pytest.fixture
async def lonely(short: str) -> AsyncIterator[Chain]:
    """A chain whose backend does not serve."""
    built = Chain(short)
    async with built.onwards, server.serving(built.front, built.service):
        yield built
        await built.caller.close()


@pytest.fixture
async def chain(lonely: Chain) -> AsyncIterator[Chain]:
    async with lonely.serving(lonely.backend):
        yield lonely


@METHODS
@pytest.mark.spec("D-28")
async def test_bytes_pass_through_unchanged(chain: Chain, method: str) -> None:
    data = b"\xff\x00 not even a message"
    assert await chain.call(method)(data) == data
    assert chain.backend.requests == [data]
    assert chain.backend.methods[-1] == method


@METHODS
async def test_large_message_passes(chain: Chain, method: str) -> None:
    """The request at the limit of a server, which is that of a Go driver too; the answer as long as a list may be."""
    data = os.urandom(32 << 20)

    async def answer(request: bytes, _: Context) -> bytes:
        return request + data

    chain.backend.unary = answer
    assert await chain.call(method)(data[: 4 << 20]) == data[: 4 << 20] + data


@METHODS
@pytest.mark.spec("D-28")
async def test_metadata_passes_both_ways(chain: Chain, method: str) -> None:
    async def answer(request: bytes, context: Context) -> bytes:
        await context.send_initial_metadata((("x-first", "1"), ("x-first-bin", b"\x00\xff")))
        context.set_trailing_metadata((("x-last", "2"), ("x-last-bin", b"\xfe")))
        return b"ok"

    chain.backend.unary = answer
    call = chain.call(method)(b"", metadata=(("x-trace", "abc"), ("x-blob-bin", b"\x00\x01\xff")))
    assert await call == b"ok"
    assert chain.backend.metadata["x-trace"] == "abc"
    assert chain.backend.metadata["x-blob-bin"] == b"\x00\x01\xff"
    initial, trailing = dict(await call.initial_metadata()), dict(await call.trailing_metadata())
    assert (initial["x-first"], initial["x-first-bin"]) == ("1", b"\x00\xff")
    assert (trailing["x-last"], trailing["x-last-bin"]) == ("2", b"\xfe")


@METHODS
async def test_status_passes_with_message_and_details(chain: Chain, method: str) -> None:
    async def answer(request: bytes, context: Context) -> bytes:
        trailing = (("grpc-status-details-bin", b"\x08\x05"), ("x-why", "so"))
        await context.abort(grpc.StatusCode.DATA_LOSS, "bits are göne", trailing)
        raise AssertionError

    chain.backend.unary = answer
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await chain.call(method)(b"")
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert caught.value.details() == "bits are göne"
    trailing = dict(caught.value.trailing_metadata())
    assert trailing["grpc-status-details-bin"] == b"\x08\x05"
    assert trailing["x-why"] == "so"


@METHODS
async def test_deadline_reaches_the_backend(chain: Chain, method: str) -> None:
    await chain.call(method)(b"", timeout=50)
    assert chain.backend.time_left_s is not None
    assert 0 < chain.backend.time_left_s <= 51  # gRPC rounds up
    chain.backend.time_left_s = 0
    await chain.call(method)(b"")
    left_s: float | None = chain.backend.time_left_s
    assert left_s is None or left_s > 1e6


@METHODS
async def test_cancelled_caller_cancels_the_backends_call(chain: Chain, method: str) -> None:
    gate = Gate()

    async def answer(request: bytes, context: Context) -> bytes:
        await gate.stop()
        return b""

    chain.backend.unary = answer
    call = chain.call(method)(b"")
    waiting = asyncio.ensure_future(_result(call))
    await until(gate.entered)
    call.cancel()
    await until(gate.cancelled)
    await asyncio.wait([waiting])


@METHODS
async def test_restarted_backend_is_found_again(lonely: Chain, method: str) -> None:
    for _ in range(2):
        await refused(lonely.call(method)(b"x"), grpc.StatusCode.UNAVAILABLE)
        async with lonely.serving(lonely.backend):
            call = partial(lonely.call(method), b"x")
            assert await repeated(call, grpc.StatusCode.UNAVAILABLE) == b"x"


@METHODS
async def test_unknown_method_of_the_backend_is_unimplemented(lonely: Chain, method: str) -> None:
    async with lonely.serving():
        await refused(lonely.call(method)(b""), grpc.StatusCode.UNIMPLEMENTED)


async def test_stream_of_answers_passes_message_by_message(chain: Chain) -> None:
    stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
    stream = chain.caller.unary_stream("/csi.v9.Future/Stream")
    call = stream(b"one")
    assert await call.read() == b"one"
    assert await call.read() == b"ONE"
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_unknown_method_names_are_not_kept(chain: Chain) -> None:
    """Callers choose them, without a bound."""
    for number in range(3):
        await chain.call(f"/unknown/M{number}")(b"")
    await chain.call(UNARY)(b"")
    kept = repr([vars(part) for part in (chain.service, chain.onwards)])
    assert "/unknown" not in kept
    assert UNARY in kept


async def _result(call: Any) -> Any:
    return await call


async def test_hanging_peer_is_reported_before_the_callers_deadline(short: str) -> None:
    """The kubelet's event then has the reason, and not a bare "context deadline exceeded"."""
    hangs = asyncio.Event()

    async def hang(_: object, data: bytes, __: Call) -> bytes:
        await hangs.wait()
        return data

    method = "/csi.v1.Node/NodeGetCapabilities"
    driver, shim, front = f"{short}/driver", f"{short}/shim", f"{short}/front"
    async with (
        server.serving(driver, Service("driver", Methods({method: hang}))),
        SocketPort(driver) as to_driver,
        server.serving(shim, Service("shim", others=to_driver)),
        SocketPort(shim) as to_shim,
        server.serving(front, Service("front", others=to_shim)),
        channel.connect(front) as connected,
    ):
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connected.unary_unary(method)
        text = await refused_in_time(
            lambda: call(b"", timeout=2), grpc.StatusCode.UNAVAILABLE, "[PeerNotResponding]"
        )
        assert re.search(r"has not answered for 1\.[6-9] s", text), text
        hangs.set()
