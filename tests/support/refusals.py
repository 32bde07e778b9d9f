"""What a refused call must look like: the right code, and a message with what, why and what to do."""

from collections.abc import Awaitable
from typing import Any

import grpc
import grpc.aio
import pytest


async def refused(call: Awaitable[Any], code: grpc.StatusCode, *words: str) -> str:
    """Await a call that must fail with `code`, each of `words` in its message; returns the message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    details = caught.value.details() or ""
    assert caught.value.code() is code, f"{caught.value.code()}: {details}"
    for word in words:
        assert word in details, details
    return details
