"""A socket belongs to one process, and calls in flight are finished."""

import asyncio
import os
import select
import socket
import stat
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest

from crust.core import errors
from crust.core.supervised import Health
from crust.host.files import locks
from crust.rpc import channel
from crust.rpc.call import Call
from crust.rpc.serving import server, sockets
from crust.rpc.serving.service import Methods, Service
from tests.support.echo_service import echo, echo_service, start
from tests.support.raised import raised


class WaitableHealth(Health):
    """One that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._woken = asyncio.Event()

    def report(
        self, part: str, problem: errors.CrustError | None, *, is_fatal: bool = True
    ) -> None:
        super().report(part, problem, is_fatal=is_fatal)
        if problem is not None:
            self._woken.set()

    async def unhealthy(self) -> None:
        async with asyncio.timeout(60):
            await self._woken.wait()


async def test_server_serves_and_leaves_no_socket(short: str) -> None:
    path = f"{short}/a.sock"
    async with server.serving(path, echo_service()):
        assert await echo(path) == b"hello"
        mode = os.stat(path).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
    assert not os.path.exists(path)


async def test_socket_of_another_program_is_refused_with_its_process(short: str) -> None:
    """It holds no lock of crust: a driver still serves the socket that the proxy is to serve."""
    path = f"{short}/a.sock"
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(path)
        stranger.listen()
        before = os.stat(path).st_ino
        with raised("SocketInUse", match=f"process {os.getpid()} already listens"):
            await start(path)
        assert os.stat(path).st_ino == before


async def test_server_whose_socket_path_was_replaced_is_unhealthy(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vendor's driver restarts with its old --endpoint: then the CO calls that driver instead of this server."""
    monkeypatch.setattr(server, "CHECK_S", 0.01)
    path, health = f"{short}/a.sock", WaitableHealth()
    async with server.serving(path, echo_service(health)):
        with socket.socket(socket.AF_UNIX) as vendor:
            os.unlink(path)
            vendor.bind(path)
            vendor.listen()
            inode = os.stat(path).st_ino
            await health.unhealthy()
            with raised("SocketLost", match="another process put its own socket"):
                health.check_healthy()
    assert os.stat(path).st_ino == inode  # our stop left the other's socket alone


async def test_replaced_socket_path_always_has_a_listener(short: str) -> None:
    """A stale socket is replaced by rename, and the name that was bound is gone."""
    path = f"{short}/a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    async with server.serving(path, echo_service(), lock_path=f"{short}/lock"):
        assert await echo(path) == b"hello"
        assert sorted(os.listdir(short)) == ["a.sock", "lock"]
    assert os.listdir(short) == ["lock"]


async def test_socket_of_a_listener_that_hangs_is_refused(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_PROBE_S", 0.05)
    path = f"{short}/a.sock"
    with socket.socket(socket.AF_UNIX) as stranger, socket.socket(socket.AF_UNIX) as waiting:
        stranger.bind(path)
        stranger.listen(0)
        waiting.connect(path)  # fills the queue: nobody accepts
        with pytest.raises(errors.CrustError, match="for the listener"):
            await start(path)


_SERVER = """
import asyncio, sys
from crust.rpc.serving import server
from tests.support.echo_service import echo_service

async def main():
    async with server.serving(sys.argv[1], echo_service()):
        print("serving", flush=True)
        await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


@asynccontextmanager
async def _killed_at_the_end(path: str) -> AsyncIterator[int]:
    """The pid of another process that serves at the path, and is killed at the block's end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SERVER, path, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"serving\n"
        yield process.pid
    finally:
        process.kill()
        await process.wait()


async def test_socket_of_killed_process_is_replaced(short: str) -> None:
    path = f"{short}/a.sock"
    async with _killed_at_the_end(path) as pid:
        with pytest.raises(locks.LockHeld, match=f"process {pid} holds it"):
            await start(path)
    assert os.path.exists(path)
    async with server.serving(path, echo_service()):
        assert await echo(path) == b"hello"


async def test_file_at_the_socket_path_is_kept(short: str) -> None:
    path = Path(short, "a.sock")
    path.write_text("mine")
    with raised("NotASocket", match="not a socket"):
        await start(str(path))
    assert path.read_text() == "mine"
    path.unlink()
    async with server.serving(str(path), Service("t")):  # the refusal gave the lock back
        pass


@pytest.mark.parametrize("path", ["relative.sock", "unix:///run/a.sock", ""])
async def test_socket_path_that_is_not_absolute_is_refused(path: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="not absolute"):
        await start(path)


@pytest.mark.parametrize("path", ["/run/a.sock\0b", "/run/a\n.sock", "/run/\x9b.sock"])
async def test_socket_path_with_control_character_is_refused(path: str) -> None:
    """gRPC ends a path at a NUL, and would serve and call another socket."""
    with pytest.raises(errors.InvalidRequest, match="control character"):
        await start(path)


async def test_socket_path_that_is_too_long_creates_nothing(short: str) -> None:
    with raised("SocketPathTooLong", match="107"):
        await start(f"{short}/{'d' * 90}/a.sock")
    assert os.listdir(short) == []


async def test_lock_may_lie_elsewhere(short: str) -> None:
    """CSI allows no other file beside a plugin's socket."""
    path = f"{short}/plugin/csi.sock"
    async with server.serving(path, Service("t"), lock_path=f"{short}/run/csi.lock"):
        assert os.listdir(f"{short}/plugin") == ["csi.sock"]
        assert stat.S_IMODE(os.stat(f"{short}/plugin").st_mode) == 0o700


async def test_socket_that_cannot_be_bound_raises_socket_bind_failed(
    short: str, capfd: pytest.CaptureFixture[str]
) -> None:
    os.symlink(f"{short}/nowhere/deep", f"{short}/plugin")
    with pytest.raises(errors.CrustError, match=r"csi.sock"):
        await start(f"{short}/plugin/csi.sock", lock_path=f"{short}/csi.lock")
    capfd.readouterr()


async def test_stop_waits_for_running_calls(short: str) -> None:
    path = f"{short}/a.sock"
    began, end = asyncio.Event(), asyncio.Event()

    async def slow(_: object, data: bytes, __: Call) -> bytes:
        began.set()
        await end.wait()
        return b"done"

    serving = server.serving(path, Service("t", Methods({"/x/Y": slow})))
    await serving.__aenter__()
    call = asyncio.create_task(echo(path))
    await began.wait()
    stop = asyncio.create_task(serving.__aexit__(None, None, None))
    await asyncio.wait([stop], timeout=0)
    end.set()
    assert await call == b"done"
    await stop


async def _sized(_: object, data: bytes, __: Call) -> bytes:
    return bytes(int(data[:16]))


async def test_large_request_is_refused_and_large_answer_is_sent(short: str) -> None:
    """Requests of CSI are small, and their memory is the daemon's. A list of volumes may have megabytes."""
    path = f"{short}/csi.sock"
    async with (
        server.serving(path, Service("t", Methods({"/x/Y": _sized}))),
        channel.connect(path) as connected,
    ):
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connected.unary_unary("/x/Y")
        size = 16 << 20
        request = str(size).zfill(16).encode()
        assert len(await call(request, timeout=60)) == size
        assert len(await call(request.ljust(4 << 20), timeout=60)) == size
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(request.ljust((4 << 20) + 1), timeout=60)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_compressed_request_is_limited_by_what_it_holds(short: str) -> None:
    """32 KiB that are 32 MiB: the limit is that of the message, and not of its bytes on the socket."""
    path = f"{short}/csi.sock"
    async with server.serving(path, echo_service()), channel.connect(path) as connected:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connected.unary_unary("/x/Y")
        squeezed = grpc.Compression.Gzip
        assert await call(bytes(1 << 20), timeout=60, compression=squeezed) == bytes(1 << 20)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(bytes(32 << 20), timeout=60, compression=squeezed)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_reset_streams_of_one_peer_cancel_no_call_of_another(short: str) -> None:
    """HTTP/2 rapid reset: without a limit of streams gRPC sheds load on all connections."""
    path = f"{short}/csi.sock"
    async with server.serving(path, echo_service()):
        flood = asyncio.create_task(asyncio.to_thread(_reset_streams, path, 20_000))
        codes: Counter[grpc.StatusCode] = Counter()
        async with channel.connect(path) as connected:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connected.unary_unary("/x/Y")
            while not flood.done():
                running = call(b"hello", timeout=60)
                codes[await running.code()] += 1
        await flood
    assert codes.keys() == {grpc.StatusCode.OK}


async def test_endless_headers_hold_a_part_of_memory_and_nobody(short: str) -> None:
    """HTTP/2 CONTINUATION: 2 GiB of fields of one stream, without an end. gRPC frees what it has read a while after.

    The server is alone in its process, so that the memory is its own.
    """
    path = f"{short}/csi.sock"
    sent_bytes = 2 << 30
    async with _killed_at_the_end(path) as pid:
        flood = asyncio.create_task(asyncio.to_thread(_endless_headers, path, sent_bytes))
        codes: Counter[grpc.StatusCode] = Counter()
        async with channel.connect(path) as connected:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connected.unary_unary("/x/Y")
            while not flood.done():
                running = call(b"hello", timeout=60)
                codes[await running.code()] += 1
        await flood
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        highest_bytes = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    assert codes.keys() == {grpc.StatusCode.OK}
    # 16 to 745 MiB on a quiet machine; a busy one frees later, and memory that follows the flood takes all of it
    assert highest_bytes < sent_bytes // 4 * 3


def _fields(*others: tuple[str, str]) -> bytes:
    """The fields of a call: literals without indexing, with a new name (RFC 7541, 6.2.2)."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": "/x/Y", ":authority": "localhost",
        "te": "trailers", "content-type": "application/grpc",  # codespell:ignore te
    }  # fmt: skip
    return b"".join(
        b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in field)
        for field in (*fields.items(), *others)
    )


@contextmanager
def _connected(path: str) -> Iterator[socket.socket]:
    """A connection of HTTP/2 to the server, which may close it during the block (RFC 9113)."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        with suppress(BrokenPipeError, ConnectionResetError):
            yield connection


def _endless_headers(path: str, size: int) -> None:
    """Send fields of this size, in frames that do not end them."""
    part = _fields(*[(f"x-{number}", "y" * 100) for number in range(100)])
    with _connected(path) as connection:
        connection.sendall(_frame(1, 0, 1, _fields()))
        for _ in range(size // len(part)):
            connection.sendall(_frame(9, 0, 1, part))


def _reset_streams(path: str, count: int) -> None:
    """Open and reset this many streams of one connection, as fast as the server reads them."""
    with _connected(path) as connection:
        for stream in range(1, 2 * count, 2):
            opened = _frame(1, 4, stream, _fields())
            connection.sendall(opened + _frame(3, 0, stream, struct.pack(">I", 8)))
            while select.select([connection], [], [], 0)[0] and connection.recv(1 << 20):
                pass


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags])
    return head + struct.pack(">I", stream) + payload
