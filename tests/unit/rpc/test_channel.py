"""A channel waits for a slow peer as long as its caller does."""

import socket

import grpc
import grpc.aio
import pytest

from tests.support.echo_service import echo


async def test_slow_peer_is_waited_for_until_the_callers_deadline(short: str) -> None:
    """On a busy machine calls failed with UNAVAILABLE because one attempt to connect had 50 ms."""
    path = f"{short}/mute.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await echo(path, timeout=0.5)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
