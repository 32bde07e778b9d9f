"""Connections that say nothing are bounded in number and in time, and a quiet caller that lives keeps its own."""

import asyncio
import contextlib
import select
import socket
import struct
from collections.abc import Iterator

import grpc
import pytest

from crust.rpc import channel
from crust.rpc.serving import server
from tests.support.echo_service import echo, echo_service

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The beginning of a connection (RFC 9113, 3.4): the magic text, and SETTINGS without a setting."""

_PING = 6
_MOST = 20


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of a server, smaller, so that a test meets each of them soon."""
    smaller = {
        "grpc.max_allowed_incoming_connections": _MOST,
        "grpc.server_handshake_timeout_ms": 500,
        "grpc.keepalive_time_ms": 500,
        "grpc.http2.ping_timeout_ms": 500,
    }
    options = dict(channel.SERVER_OPTIONS)
    assert options.keys() >= smaller.keys()
    monkeypatch.setattr(channel, "SERVER_OPTIONS", tuple((options | smaller).items()))


@contextlib.contextmanager
def connections(path: str, count: int, first: bytes) -> Iterator[list[socket.socket]]:
    """Connections that say `first`, and nothing more."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(count)]
        for connection in opened:
            connection.connect(path)
            with contextlib.suppress(BrokenPipeError):  # it was closed at once
                connection.sendall(first)
        yield opened


def wait_until_open(opened: list[socket.socket], count: int) -> None:
    """Read what the server sends, and return when it has left at most `count` of the connections open."""
    live = set(opened)
    while len(live) > count:
        ready, _, _ = select.select(list(live), [], [], 60)
        assert ready, f"{len(live)} connections stay open"
        for connection in ready:
            with contextlib.suppress(ConnectionResetError):
                if connection.recv(1 << 16):
                    continue
            live.discard(connection)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("first", [b"", _PREFACE], ids=["silent", "preface"])
async def test_idle_connections_are_bounded_and_end(short: str, first: bytes) -> None:
    path = f"{short}/csi.sock"
    async with server.serving(path, echo_service()):
        with connections(path, 3 * _MOST, first) as opened:
            await asyncio.to_thread(wait_until_open, opened, _MOST)
            await asyncio.to_thread(wait_until_open, opened, 0)
            assert await echo(path) == b"hello"


@pytest.mark.usefixtures("limits")
async def test_connections_beyond_the_limit_are_refused_as_unavailable(short: str) -> None:
    """The caller retries, as a kubelet does; the process keeps its descriptors for the calls of other sockets."""
    path, other = f"{short}/csi.sock", f"{short}/other.sock"
    async with server.serving(path, echo_service()), server.serving(other, echo_service()):
        with connections(path, 3 * _MOST, _PREFACE):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await echo(path)
            assert await echo(other) == b"hello"
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.usefixtures("limits")
async def test_quiet_caller_that_answers_pings_keeps_its_connection(short: str) -> None:
    """A sidecar of Kubernetes ends when it loses its connection."""
    path = f"{short}/csi.sock"
    async with server.serving(path, echo_service()):
        with connections(path, 1, _PREFACE) as opened:
            assert await asyncio.to_thread(_answered_pings, opened[0], 4) == 4


def _answered_pings(connection: socket.socket, count: int) -> int:
    """Answer this many pings of the server; fewer, if it closes the connection."""
    connection.settimeout(60)
    answered = 0
    with connection.makefile("rb") as frames:
        while answered < count and len(head := frames.read(9)) == 9:
            payload = frames.read(struct.unpack(">I", b"\0" + head[:3])[0])
            if head[3] == _PING:
                connection.sendall(head[:4] + b"\1" + head[5:] + payload)
                answered += 1
    return answered
