"""The daemon's control socket for clients: one request per connection, one answer per line.

When a client disconnects while its command runs, the daemon kills the command's container, as closing a terminal
would. When the daemon stops, it also ends each sandbox that was created for one command alone. Only root may open the
socket: a process that can write to it can run commands in any sandbox.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crust.core import errors, volumes
from examples.kata.runtime import messages, ports
from examples.kata.runtime.sandbox import Sandbox
from examples.kata.runtime.sandboxes import Sandboxes
from examples.kata.vm import values

_log = logging.getLogger(__name__)

_KILL_TIMEOUT_S = 30.0
"""How long a killed command may take to end before its sandbox is stopped anyway."""


_LIMITS_TIMEOUT_S = 2.0
"""How long a list request waits for the limits of each QEMU."""


class RequestFailed(errors.RuntimeFailed):
    """A system call failed while the daemon served a request."""

    def __init__(self, err: OSError) -> None:
        super().__init__("the request failed", why=str(err), hint="look at the runtime's log")


class SandboxUnknown(errors.NotFound):
    """No sandbox of that name runs."""

    def __init__(self, sandbox: str) -> None:
        super().__init__(
            f"there is no sandbox {sandbox}",
            why="this runtime has none of that name, or could not adopt it",
            hint="python -m examples.kata ps lists them",
        )


class Control:
    """Answers clients."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            line = await _line(reader)
            if line:
                await self._serve(messages.parse(line), reader, writer)
        except errors.CrustError as error:
            await _refuse(writer, error)
        except ConnectionError:
            _log.info("client disconnected")
        except OSError as err:
            await _refuse(writer, RequestFailed(err))
        finally:
            writer.close()

    async def _serve(
        self,
        request: messages.AnyRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if isinstance(request, messages.Run):
            await self._run(request, reader, writer)
        elif isinstance(request, messages.Stop):
            await self._sandboxes.stop(volumes.SandboxId(request.sandbox))
            await _send(writer, {"event": "done"})
        elif isinstance(request, messages.Logs):
            await self._logs(request, reader, writer)
        else:
            listed = {
                "sandboxes": await self._list(),
                "not_adopted": list(self._sandboxes.not_adopted()),
            }
            await _send(writer, {"event": "done", **listed})

    async def _run(
        self, request: messages.Run, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        sandbox_id = volumes.SandboxId(request.sandbox)
        try:
            sandbox = await self._sandboxes.get(sandbox_id)
        except asyncio.CancelledError:  # the start continues, so its sandbox must be stopped
            if not request.keep:
                await self._sandboxes.stop(sandbox_id)
            raise
        try:
            container = await sandbox.start(request)
            await _follow(container, reader, writer)
        finally:
            if not request.keep:
                await self._sandboxes.stop(sandbox_id)

    async def _logs(
        self, request: messages.Logs, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        matching = (
            candidate
            for candidate in self._sandboxes.all()
            if candidate.sandbox_id == request.sandbox
        )
        sandbox = next(matching, None)
        if sandbox is None:
            raise SandboxUnknown(request.sandbox)
        disconnected = asyncio.create_task(reader.read(1), name="client")
        printing = asyncio.create_task(_print(sandbox, writer, follow=request.follow), name="logs")
        try:
            await asyncio.wait((disconnected, printing), return_when=asyncio.FIRST_COMPLETED)
            if printing.done():
                printing.result()
        finally:
            disconnected.cancel()
            printing.cancel()
            await asyncio.gather(disconnected, printing, return_exceptions=True)

    async def _list(self) -> list[dict[str, Any]]:
        sandboxes = self._sandboxes.all()
        limits = await asyncio.gather(*map(_limits, sandboxes))
        return [
            {
                "sandbox": sandbox.sandbox_id,
                "pid": sandbox.vm.pid,
                "accelerator": sandbox.vm.identity.acceleration,
                "volumes": [held.target.text for held in sandbox.held],
                "limits": of,
            }
            for sandbox, of in zip(sandboxes, limits, strict=True)
        ]


async def _limits(sandbox: Sandbox) -> dict[str, dict[str, int]]:
    """The I/O limits that QEMU enforces, by target path; empty if QEMU does not answer."""
    held = sandbox.held
    try:
        async with asyncio.timeout(_LIMITS_TIMEOUT_S):
            limits = await asyncio.gather(*(sandbox.vm.limits(volume.serial) for volume in held))
    except (errors.CrustError, TimeoutError):
        return {}
    by_target = {volume.target.text: of for volume, of in zip(held, limits, strict=True)}
    return {target: asdict(of) for target, of in by_target.items() if of != volumes.IoLimits()}


@asynccontextmanager
async def serving(socket_path: Path, control: Control) -> AsyncIterator[None]:
    """Serve `control` on `socket_path` until the block is left. The caller owns the directory's lock."""
    with contextlib.suppress(FileNotFoundError):
        await asyncio.to_thread(os.unlink, socket_path)
    clients: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = asyncio.create_task(control.answer(reader, writer), name="client")
        clients.add(client)
        client.add_done_callback(clients.discard)

    server = await asyncio.start_unix_server(
        connected, str(socket_path), limit=messages.LIMIT_BYTES
    )
    await asyncio.to_thread(os.chmod, socket_path, 0o600)
    try:
        yield
    finally:
        server.close()
        with contextlib.suppress(FileNotFoundError):
            await asyncio.to_thread(os.unlink, socket_path)
        # Before the daemon releases its VMs, because a cancelled client may still have to stop its sandbox.
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def _follow(
    container: ports.Container, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Forward output until the container ends; kill the container when its client disconnects."""
    disconnected = asyncio.create_task(reader.read(1), name="client")
    following = asyncio.create_task(_forward_output(container, writer), name="output")
    try:
        await asyncio.wait((disconnected, following), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            await _send(writer, {"event": "exit", "code": _code(following.result())})
            return
        await container.kill()
        await asyncio.wait((following,), timeout=_KILL_TIMEOUT_S)
    finally:
        disconnected.cancel()
        following.cancel()
        await asyncio.gather(disconnected, following, return_exceptions=True)
        with contextlib.suppress(errors.CrustError):
            await container.release()


async def _forward_output(container: ports.Container, writer: asyncio.StreamWriter) -> values.Exit:
    async for piece in container.output_pieces():
        with contextlib.suppress(ConnectionError):  # `_follow` notices the disconnect and kills
            await _send(writer, messages.output(piece.stream, piece.data))
    return await container.wait()


async def _print(sandbox: Sandbox, writer: asyncio.StreamWriter, *, follow: bool) -> None:
    async for data in sandbox.vm.console.pieces(follow=follow):
        await _send(writer, messages.output("stdout", data))
    await _send(writer, {"event": "done"})


def _code(ending: values.Exit) -> int:
    return ending.code if ending.code is not None else 128 + (ending.signal or 0)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError as err:
        raise messages.InvalidMessage(f"it has more than {messages.LIMIT_BYTES} bytes") from err


async def _refuse(writer: asyncio.StreamWriter, error: errors.CrustError) -> None:
    _log.warning("refused", extra={"error": error})
    with contextlib.suppress(ConnectionError):
        await _send(writer, messages.failure(error))


async def _send(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(messages.encode(answer))
    await writer.drain()
