"""What a refused call must look like: the right code, and a message with what, why and what to do."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

Answer = TypeVar("Answer")


async def refused(call: Awaitable[Any], code: grpc.StatusCode, *words: str) -> str:
    """Await a call that must fail with `code`, each of `words` in its message; returns the message."""
    with pytest.raises((grpc.aio.AioRpcError, PeerStatus)) as caught:
        await call
    error = caught.value
    if isinstance(error, PeerStatus):  # of a call through a port
        return _has(error.code, error.text, code, words)
    assert isinstance(error, grpc.aio.AioRpcError)
    return _checked(error, code, words)


async def refused_in_time(
    call: Callable[[], Awaitable[Any]], code: grpc.StatusCode, *words: str
) -> str:
    """Like `refused`, of a call that ends because its time does: shortly before, so that the caller hears the reason.

    A busy machine may deliver the reason too late. Then the call is made again; the test's own limit ends a call that
    is never answered in time.
    """
    while True:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
        if caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return _checked(caught.value, code, words)


async def repeated(
    call: Callable[[], Awaitable[Answer]],
    *codes: grpc.StatusCode,
    while_named: str = "",
    within_s: float = 120,
) -> Answer:
    """Repeat a call, as a CO does, while it is refused with one of these codes, or with the error of this name."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await call()
            except PeerStatus as error:  # of a call through a port
                if error.code not in codes:
                    raise
            except grpc.aio.AioRpcError as error:
                is_named = while_named and while_named in (error.details() or "")
                if not is_named and error.code() not in codes:
                    raise
            await asyncio.sleep(0.05)


def _checked(error: grpc.aio.AioRpcError, code: grpc.StatusCode, words: Sequence[str]) -> str:
    return _has(error.code(), error.details() or "", code, words)


def _has(
    answered: grpc.StatusCode, details: str, code: grpc.StatusCode, words: Sequence[str]
) -> str:
    assert answered is code, f"{answered}: {details}"
    for word in words:
        assert word in details, details
    return details


async def until(event: asyncio.Event) -> None:
    """Wait for an event, at most as long as a hung test may take."""
    async with asyncio.timeout(60):
        await event.wait()


async def until_probe(
    channel: grpc.aio.Channel, code: grpc.StatusCode, words: str = "", within_s: float = 60
) -> str:
    """Repeat Probe until it is answered with `code`; returns the message, which has `words` in it."""
    identity: csi_pb2_grpc.IdentityAsyncStub = csi_pb2_grpc.IdentityStub(channel)
    async with asyncio.timeout(within_s):
        while True:
            answered, details = grpc.StatusCode.OK, ""
            try:
                await identity.Probe(csi_pb2.ProbeRequest(), timeout=10)
            except grpc.aio.AioRpcError as error:
                answered, details = error.code(), error.details() or ""
            if answered is code:
                assert words in details, details
                return details
