"""Channels to peers that are slow."""

import socket
from pathlib import Path

import grpc
import grpc.aio
import pytest

from crust.rpc import channel


async def test_slow_peer_is_waited_for_until_the_callers_deadline(
    tmp_path: Path,
) -> None:
    """On a busy machine calls failed with UNAVAILABLE because one attempt to connect had 50 ms."""
    path = str(tmp_path / "mute.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        async with channel.connect(path) as connected:
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connected.unary_unary("/x/Y")
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await method(b"", timeout=0.5)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
