"""The protocol of a takeover, on a socket beside the process's lock.

One line of JSON each way, in this order, on one connection:

    successor    {"want": "state", "of": <its driver>}            "of" is left out by a process without a driver
    predecessor  {"released": {<socket>: [<device>, <inode>], …}}   its locks are free, it writes no more
                 or {"refused": <why>}, and it goes on as before
    successor    {"serving": true}                                    it holds the locks, and its sockets are in place

The locks decide, not the messages: a successor writes only while it holds the locks, and a predecessor sends
"released" after it has released them. If the predecessor dies, the kernel releases its locks and the successor starts
as after any kill. If the successor dies before "serving", the predecessor cannot know what was written meanwhile: it
exits with an error, and its supervisor starts it again.

The next version of a process runs the same driver. Two processes of different drivers that have one directory by
mistake would take over from each other without end, and each time leave the other's volumes without a driver: so "of"
is compared.
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from crust import errors
from crust.host.process import oserrors
from crust.rpc.serving import sockets

ANSWER_S = 100.0
"""How long a successor waits for the locks: longer than a predecessor drains."""

_LINE_MAX_BYTES = 1 << 20


class TakeoverRefused(errors.NotReady):
    """The process that holds the lock does not release it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the process that owns {path} cannot be taken over",
            why=why,
            hint="retry when its operations have ended, or stop it first",
        )


class Predecessor:
    """The connection to the process that was taken over."""

    def __init__(
        self, released: Mapping[str, sockets.Identity], writer: asyncio.StreamWriter | None
    ) -> None:
        self.released = released
        self._writer = writer

    async def report_serving(self) -> None:
        """Report that this process serves: the predecessor forwards its callers from now on. Call it once."""
        if self._writer is None:
            return
        with contextlib.suppress(
            ConnectionError
        ):  # it has ended, and its callers' connections with it
            await _send(self._writer, {"serving": True})
        self.close()

    def close(self) -> None:
        """Close the connection; without `report_serving` the predecessor treats this process as dead."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


async def ask(path: str, of: str = "") -> Predecessor:
    """Ask the process that listens on `path` for its state; raises `TakeoverRefused`.

    `of`: the driver that runs here. A holder that dies meanwhile has released everything, and none of its sockets is
    alive.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=_LINE_MAX_BYTES)
    except OSError as err:
        raise TakeoverRefused(path, f"it does not answer on {path}: {err.strerror}") from err
    try:
        with contextlib.suppress(ConnectionError):
            await _send(writer, {"want": "state", "of": of} if of else {"want": "state"})
        async with asyncio.timeout(ANSWER_S):
            answer = await _receive(reader)
    except TimeoutError:
        writer.close()
        raise TakeoverRefused(path, f"it has not answered for {ANSWER_S:g} s") from None
    except BaseException:
        writer.close()
        raise
    if "refused" in answer:
        writer.close()
        raise TakeoverRefused(path, str(answer["refused"]))
    released = {
        str(path): (int(device), int(inode))
        for path, (device, inode) in answer.get("released", {}).items()
    }
    return Predecessor(released, writer)


@asynccontextmanager
async def listening(
    path: str, release: Callable[[], Awaitable[Mapping[str, sockets.Identity]]], of: str = ""
) -> AsyncIterator[asyncio.Future[None]]:
    """Be ready to be taken over while the block runs, by a process of the same driver.

    `release` stops everything that writes and releases the locks; if it raises `TakeoverRefused`, it has changed
    nothing. The future is done when the successor serves, or failed with `SuccessorLost`.
    """
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    busy = asyncio.Lock()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            asked = await _receive(reader)
            if asked.get("want") != "state":
                return
            if asked.get("of", of) != of and of:
                why = f"it runs the driver {of}: give each driver's process a run_dir of its own"
                await _send(writer, {"refused": why})
                return
            if busy.locked() or ended.done():
                await _send(writer, {"refused": "another process takes it over already"})
                return
            async with busy:
                await _hand_over(reader, writer, release, ended)

    own, listener = await asyncio.to_thread(_bind, path)
    server = await asyncio.start_unix_server(answer, sock=listener, limit=_LINE_MAX_BYTES)
    try:
        yield ended
    finally:
        server.close()
        await asyncio.to_thread(own.remove)
        ended.cancel()


class SuccessorLost(errors.PeerUnavailable):
    """This process released its state, and the process that asked for it died before it served."""

    def __init__(self) -> None:
        super().__init__(
            "this process has stopped serving",
            why="the process that took it over ended before it served",
            hint="start this one again, and look at the log of the other one",
        )


async def _hand_over(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    release: Callable[[], Awaitable[Mapping[str, sockets.Identity]]],
    ended: asyncio.Future[None],
) -> None:
    try:
        released = await release()
    except TakeoverRefused as refusal:
        await _send(writer, {"refused": str(refusal)})
        return
    try:
        await _send(writer, {"released": released})
        served = (await _receive(reader)).get("serving") is True
    except ConnectionError:
        served = False
    if ended.done():
        return
    if served:
        ended.set_result(None)
    else:
        ended.set_exception(SuccessorLost())


def _bind(path: str) -> tuple[sockets.OwnSocket, socket.socket]:
    listener = socket.socket(socket.AF_UNIX)
    bound = sockets.beside(path)
    try:
        with oserrors.translating(f"cannot listen on {path}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(bound)
            listener.bind(bound)
            listener.listen()
            listener.settimeout(0)
        return sockets.OwnSocket.place(bound, path), listener
    except BaseException:
        listener.close()
        raise


async def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message; empty when the peer has closed the connection or sends another protocol."""
    try:
        message = json.loads(await reader.readline())
    except (ValueError, ConnectionError):
        return {}
    return message if isinstance(message, dict) else {}
