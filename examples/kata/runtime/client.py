"""The client of the runtime's daemon, for the command line and the demo."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from crust.core import errors
from examples.kata.runtime import messages


class RuntimeUnreachable(errors.PeerUnavailable):
    """No daemon serves the runtime's socket."""

    def __init__(self, socket: str, why: str) -> None:
        super().__init__(
            f"the runtime does not answer on {socket}",
            why=why,
            hint="start it: python -m examples.kata serve",
        )


class RuntimeRefused(errors.RuntimeFailed):
    """The runtime answered a request with an error; this carries its message."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(str(answer["what"]), why=str(answer["why"]), hint=str(answer["hint"]))
        self.error_name = str(answer["kind"])


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended. `code` is 128 + the signal's number if a signal killed it."""

    code: int
    stdout: bytes
    stderr: bytes


Sink = Callable[[str, bytes], None]


class Client:
    """Talks to the daemon on `socket`; one connection per request."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    async def run(self, request: messages.Run, sink: Sink | None = None) -> Finished:
        """Run a command to its end; collect its output, and pass each piece to `sink` when it arrives.

        A temporary sandbox has ended, too, when this returns: its volumes can be used elsewhere.

        Raises `RuntimeUnreachable`, `RuntimeRefused`.
        """
        collected = {"stdout": bytearray(), "stderr": bytearray()}
        finished: Finished | None = None
        async with self._asked(request) as answers:
            async for answer in answers:
                if answer["event"] == "exit":
                    finished = Finished(
                        answer["code"], bytes(collected["stdout"]), bytes(collected["stderr"])
                    )
                    continue  # the connection is closed once the sandbox is stopped
                data = base64.b64decode(answer["data"])
                collected[answer["stream"]] += data
                if sink is not None:
                    sink(answer["stream"], data)
        if finished is not None:
            return finished
        raise RuntimeUnreachable(self._socket, "it closed the connection before the command ended")

    async def logs(self, sandbox: str, sink: Callable[[bytes], None], *, follow: bool) -> None:
        """Pass the output of the guest's console to `sink`; with `follow` until the sandbox ends.

        Raises `RuntimeUnreachable`, `RuntimeRefused`.
        """
        async with self._asked(messages.Logs(sandbox=sandbox, follow=follow)) as answers:
            async for answer in answers:
                if answer["event"] == "done":
                    return
                sink(base64.b64decode(answer["data"]))
        raise RuntimeUnreachable(self._socket, "it closed the connection before the end")

    async def stop(self, sandbox: str) -> None:
        """Stop a sandbox."""
        await self._done(messages.Stop(sandbox=sandbox))

    async def list(self) -> list[dict[str, Any]]:
        """The sandboxes that can be used."""
        sandboxes: list[dict[str, Any]] = (await self._done(messages.List()))["sandboxes"]
        return sandboxes

    async def not_adopted(self) -> tuple[str, ...]:
        """The sandboxes whose VM runs but could not be adopted; they can only be stopped."""
        return tuple((await self._done(messages.List()))["not_adopted"])

    async def _done(self, request: messages.Stop | messages.List) -> dict[str, Any]:
        async with self._asked(request) as answers:
            async for answer in answers:
                return answer
        raise RuntimeUnreachable(self._socket, "it closed the connection without an answer")

    @asynccontextmanager
    async def _asked(
        self, request: messages.AnyRequest
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        try:
            reader, writer = await asyncio.open_unix_connection(
                self._socket, limit=messages.LIMIT_BYTES
            )
        except OSError as err:
            raise RuntimeUnreachable(self._socket, err.strerror or str(err)) from err
        try:
            writer.write(request.model_dump_json().encode() + b"\n")
            await writer.drain()
            yield self._answers(reader)
        finally:
            writer.close()

    async def _answers(self, reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
        async for line in reader:
            answer: dict[str, Any] = json.loads(line)
            if answer["event"] == "error":
                raise RuntimeRefused(answer)
            yield answer
