"""The socket of a sandbox's shim that answers questions about volumes, without a shim (Kata's Go runtime)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

Answers = Callable[[str], Awaitable[bytes]]
"""The bytes of the answer to a path."""


def ok(body: bytes) -> bytes:
    """An answer of the shim."""
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def serving(root: Path, sandbox_id: str, answers: Answers) -> AsyncIterator[list[str]]:
    """Serve while the block runs; the paths that were asked for. `root` has the state of the runtime's sandboxes."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readuntil(b"\r\n\r\n")).decode().split()[1]
        asked.append(line)
        writer.write(await answers(line))
        writer.close()

    (root / sandbox_id).mkdir(exist_ok=True)
    socket = root / sandbox_id / "shim-monitor.sock"
    try:
        async with await asyncio.start_unix_server(serve, str(socket)):
            yield asked
    finally:
        socket.unlink(missing_ok=True)
