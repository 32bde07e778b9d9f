"""The connection to the agent: requests, answers and events over the VM's agent socket.

Rules: a line has at most MAX_LINE bytes. After a protocol violation nothing more is read from the guest
(GuestProtocolViolation). Container output is sent on credit, so the guest cannot make this process buffer more than
it granted; a budget bounds its bytes per second (budget.py). A new connection first sends a newline, which ends a
partial line of an earlier host, and a `hello` with a fresh id; it drops everything before the answer. A request whose
deadline has passed continues in the guest; every operation may be repeated.
"""

import asyncio
import base64
import binascii
import contextlib
import itertools
import json
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import pydantic

from crust.core import errors, logs
from examples.kata.guest.agent import protocol
from examples.kata.vm import budget, faults, values

_log = logging.getLogger(__name__)

_GREETING_S = 1.0

R = TypeVar("R", bound=values.Reply)


class Listener(Protocol):
    """Receives the events of one container."""

    def output(self, piece: values.Output) -> None:
        """It wrote output. Raises GuestProtocolViolation if that exceeds the granted credit."""

    def ended(self, ending: values.Exit) -> None:
        """It has ended; no output follows."""

    def lost(self, err: errors.CrustError) -> None:
        """The connection has ended; no more events follow."""


def _request_id() -> dict[str, str]:
    """Of the call that the request is made for: the guest names it on its console."""
    fields = logs.context.get() or {}
    return {"request_id": fields["request_id"]} if "request_id" in fields else {}


class AgentClient:
    """One connection. `close` ends it; the guest continues to run."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._lines = protocol.Lines()
        self._budget = budget.MessageBudget()
        self._session = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._pending: dict[str, asyncio.Future[dict[str, object]]] = {}
        self._listeners: dict[str, Listener] = {}
        self._heard: set[str] = set()
        self._greeted = False
        self._failure: errors.CrustError | None = None
        self._task = asyncio.create_task(self._listen(), name="agent-listen")

    @classmethod
    async def connect(cls, path: Path, timeout_s: float) -> tuple["AgentClient", values.Hello]:
        """Connect and wait for the agent to answer, also while the guest boots.

        Raises AgentDisconnected, AgentTimedOut, GuestUnsupported.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(str(path))
        except OSError as err:
            raise faults.AgentDisconnected(err.strerror or str(err)) from err
        client = cls(reader, writer)
        try:
            hello = await client._greet(timeout_s)
            if hello.protocol != protocol.VERSION:
                reason = f"it speaks version {hello.protocol} of the protocol"
                raise faults.GuestUnsupported("the guest's agent is another version", why=reason)
        except BaseException:
            await client.close()
            raise
        return client, hello

    async def _greet(self, timeout_s: float) -> values.Hello:
        """Send `hello` until it is answered: one is lost if the agent dies and PID 1 starts another."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                self._writer.write(b"\n")
                return await self.call("hello", {}, values.Hello, min(left_s, _GREETING_S))
            except faults.AgentTimedOut as err:
                if left_s <= _GREETING_S:
                    raise faults.AgentTimedOut("hello", timeout_s) from err

    async def call(
        self, operation: str, args: Mapping[str, object], answer: type[R], timeout_s: float
    ) -> R:
        """Send a request and parse its answer.

        Raises AgentDisconnected, AgentTimedOut, GuestProtocolViolation, and the error that the guest answers.
        """
        request = f"{self._session}-{next(self._numbers)}"
        future: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._pending[request] = future
        message = {"id": request, "op": operation, "args": args, **_request_id()}
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(message)
                result = await future
            return answer.model_validate(result)
        except TimeoutError as err:
            raise faults.AgentTimedOut(operation, timeout_s) from err
        except pydantic.ValidationError as err:
            violation = faults.GuestProtocolViolation(f"its answer to {operation} is malformed")
            self._fail(violation)
            raise violation from err
        finally:
            del self._pending[request]

    def notify(self, operation: str, args: Mapping[str, object]) -> None:
        """Send a request that has no answer."""
        if self._failure is None:
            self._writer.write(_encode({"id": "", "op": operation, "args": args}))

    def listen(self, container: str, listener: Listener) -> None:
        """Deliver a container's events to `listener` until the container or the connection ends."""
        if self._failure is not None:
            raise self._failure
        self._listeners[container] = listener
        self._heard.add(container)

    def ignore(self, container: str) -> None:
        """Drop a container's events from now on."""
        self._listeners.pop(container, None)

    async def close(self) -> None:
        """End the connection; idempotent."""
        self._fail(faults.AgentDisconnected("this process closed the connection"))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _write(self, message: Mapping[str, object]) -> None:
        if self._failure is not None:
            raise self._failure
        line = _encode(message)
        if len(line) > protocol.MAX_LINE:
            raise faults.GuestBadRequest("the request does not fit a line of the agent protocol")
        self._writer.write(line)
        try:
            await self._writer.drain()
        except OSError as err:
            raise faults.AgentDisconnected(err.strerror or str(err)) from err

    async def _listen(self) -> None:
        try:
            while data := await self._reader.read(65536):
                lines = list(self._lines.feed(data))
                for line in lines:
                    self._on_line(line)
                await asyncio.sleep(self._budget.spend(len(lines), len(data)))
            self._fail(faults.AgentDisconnected("the VM closed the connection"))
        except OSError as err:
            self._fail(faults.AgentDisconnected(err.strerror or str(err)))
        except errors.CrustError as err:
            self._fail(err)

    def _on_line(self, raw: bytes | None) -> None:
        raw = raw or b""
        if not self._greeted and self._session.encode() not in raw:
            return  # it was meant for an earlier host; there may be much of it, so it is not parsed
        try:
            line = values.Line.model_validate_json(raw)
        except pydantic.ValidationError as err:
            if self._greeted:
                raise faults.GuestProtocolViolation("it sent a line that is not a message") from err
            self._on_unsolicited(len(raw))
            return
        if line.id is not None:
            self._on_answer(line.id, line, len(raw))
        elif line.container is not None and self._greeted:
            self._on_event(line.container, line, len(raw))
        else:
            self._on_unsolicited(len(raw))

    def _on_answer(self, request: str, line: values.Line, size_bytes: int) -> None:
        future = self._pending.get(request)
        if future is None or future.done():
            self._on_unsolicited(size_bytes)
            return
        self._greeted = True
        if line.error is not None:
            error = line.error
            future.set_exception(faults.of_guest(error.code, error.message, error.hint))
        else:
            future.set_result(line.ok or {})

    def _on_event(self, container: str, line: values.Line, size_bytes: int) -> None:
        listener = self._listeners.get(container)
        # A container that nobody listens to any more may still have credit.
        if container not in self._heard or (line.event == "output" and not line.data):
            self._on_unsolicited(size_bytes)
        if listener is None:
            return
        if line.event == "exit":
            self.ignore(container)
            self._heard.discard(container)
            listener.ended(values.Exit(line.code, line.signal))
        elif line.event == "output" and line.stream is not None:
            listener.output(values.Output(line.stream, _decode(line.data or "")))

    def _on_unsolicited(self, size_bytes: int) -> None:
        if not self._budget.accepts_unsolicited(size_bytes):
            raise faults.GuestProtocolViolation("it sends messages that nobody asked for")

    def _fail(self, err: errors.CrustError) -> None:
        if self._failure is not None:
            return
        self._failure = err
        _log.debug("agent connection ended", extra={"reason": str(err)})
        for future in self._pending.values():
            if not future.done():
                future.set_exception(err)
        for listener in self._listeners.values():
            listener.lost(err)
        self._listeners.clear()
        # This ends reads here and shows the guest's port that the host has left; close() does the rest.
        sock = self._writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _encode(message: Mapping[str, object]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _decode(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as err:
        raise faults.GuestProtocolViolation("its output is not base64") from err
