"""A container as the host sees it: output on credit, input, signals, and how it ended."""

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator

from crust.core import errors
from examples.kata.vm import agent, faults, values

# How much output the guest may send ahead per container; also the most that this process buffers for one.
WINDOW = 256 * 1024
_INPUT_PIECE = 96 * 1024
_ANSWER_S = 30.0


class Container:
    """One container. After iterating over `output_pieces()` to the end, `wait()` returns at once."""

    def __init__(self, client: agent.AgentClient, name: str) -> None:
        self.name = name
        self._client = client
        self._pieces: deque[values.Output] = deque()
        self._held = 0
        self._arrived = asyncio.Event()
        self._exit: values.Exit | None = None
        self._lost: errors.CrustError | None = None

    # Listener of the agent client.

    def output(self, piece: values.Output) -> None:
        """Take a piece from the guest. Raises GuestProtocolViolation beyond the window."""
        self._held += len(piece.data)
        if self._held > WINDOW:
            raise faults.GuestProtocolViolation("it sent more output than its credit")
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.stream == piece.stream:
            # Merged, because one-byte pieces kept apart would cost a hundred times their size.
            self._pieces[-1] = values.Output(piece.stream, last.data + piece.data)
        else:
            self._pieces.append(piece)
        self._arrived.set()

    def ended(self, ending: values.Exit) -> None:
        """It ended."""
        self._exit = ending
        self._arrived.set()

    def lost(self, err: errors.CrustError) -> None:
        """The connection ended first."""
        self._lost = err
        self._arrived.set()

    # For the caller that started it.

    async def read(self) -> values.Output | None:
        """The next piece of output; None at the end. Raises AgentDisconnected, GuestProtocolViolation."""
        while not self._pieces:
            if self._exit is not None:
                return None
            if self._lost is not None:
                raise self._lost
            self._arrived.clear()
            await self._arrived.wait()
        piece = self._pieces.popleft()
        self._held -= len(piece.data)
        self._client.notify("container.credit", {"container": self.name, "credit": len(piece.data)})
        return piece

    async def output_pieces(self) -> AsyncIterator[values.Output]:
        """All output to the end."""
        while (piece := await self.read()) is not None:
            yield piece

    async def wait(self) -> values.Exit:
        """Wait for its end and return how it ended; unread output is dropped."""
        while await self.read() is not None:
            pass
        assert self._exit is not None
        return self._exit

    async def collect(self, limit_bytes: int) -> values.Completed:
        """Read it to its end. Raises OutputTooLarge, and the errors of `read`."""
        streams = {"stdout": bytearray(), "stderr": bytearray()}
        async for piece in self.output_pieces():
            streams[piece.stream] += piece.data
            if sum(map(len, streams.values())) > limit_bytes:
                raise faults.OutputTooLarge(self.name, limit_bytes)
        ending = await self.wait()
        return values.Completed(ending, bytes(streams["stdout"]), bytes(streams["stderr"]))

    async def write(self, data: bytes, *, eof: bool = False) -> None:
        """Write to its standard input, at the pace at which it reads; `eof` closes it."""
        pieces = [data[i : i + _INPUT_PIECE] for i in range(0, len(data), _INPUT_PIECE)] or [b""]
        for number, piece in enumerate(pieces, start=1):
            args = {
                "container": self.name,
                "data": base64.b64encode(piece).decode(),
                "eof": eof and number == len(pieces),
            }
            await self._client.call("container.stdin", args, values.Empty, _ANSWER_S)

    async def kill(self, signal: int = 9) -> None:
        """Send a signal; an ended container is success."""
        args = {"container": self.name, "signal": signal}
        await self._client.call("container.kill", args, values.Empty, _ANSWER_S)

    async def release(self) -> None:
        """Remove its record from the guest. Raises GuestBusy while it runs."""
        self._client.ignore(self.name)
        args = {"container": self.name}
        await self._client.call("container.release", args, values.Empty, _ANSWER_S)
