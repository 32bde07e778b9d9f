"""The host's end of the agent protocol against guests that lie, flood, send malformed data or disconnect."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crust.core import errors
from examples.kata.guest.agent import protocol
from examples.kata.vm import agent, budget, containers, faults, guest, values

_HELLO = {
    "protocol": protocol.VERSION,
    "kernel": "6.1",
    "agent": "1",
    "filesystems": ["ext4"],
    "volumes": [],
}
_USAGE = {
    "total_bytes": 100,
    "available_bytes": 60,
    "used_bytes": 40,
    "total_inodes": 10,
    "available_inodes": 9,
    "used_inodes": 1,
}
Reply = Callable[[dict[str, object]], "list[object]"]


class FakeGuest:
    """An agent that answers `hello`, and anything else with what the test says."""

    def __init__(self, reply: Reply, preface: bytes = b"") -> None:
        self._reply = reply
        self._preface = preface
        self.seen: list[dict[str, object]] = []
        self.asked = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.writer = writer
        writer.write(self._preface)
        while line := await reader.readline():
            if line.strip():
                self._answer(json.loads(line), writer)
        writer.close()

    def _answer(self, request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        self.seen.append(request)
        if request["op"] == "hello":
            messages: list[object] = [{"id": request["id"], "ok": _HELLO}]
        else:
            messages = self._reply(request)
            self.asked.set()
        for message in messages:
            raw = message if isinstance(message, bytes) else json.dumps(message).encode()
            writer.write(raw + b"\n")


@asynccontextmanager
async def _connected(fake: FakeGuest, directory: Path) -> AsyncIterator[guest.Guest]:
    path = directory / "agent.sock"
    server = await asyncio.start_unix_server(fake.serve, path)
    async with server:
        client, hello = await agent.AgentClient.connect(path, 5)
        try:
            yield guest.Guest(client, hello)
        finally:
            await client.close()


def _ok(result: object) -> Reply:
    return lambda request: [{"id": request["id"], "ok": result}]


async def test_connect_skips_output_sent_to_an_earlier_host(tmp_path: Path) -> None:
    preface = b'tail of a line"}\n{"id":"old-1","ok":{}}\n' + b"x" * (protocol.MAX_LINE + 9) + b"\n"
    async with _connected(FakeGuest(_ok({"usage": _USAGE}), preface), tmp_path) as inside:
        assert (await inside.usage("v")).used_bytes == 40


async def test_answers_in_any_order_match_their_requests(tmp_path: Path) -> None:
    waiting: list[dict[str, object]] = []

    def reply(request: dict[str, object]) -> list[object]:
        waiting.append(request)
        if len(waiting) < 3:
            return []
        answers: list[object] = []
        for late in reversed(waiting):
            args = late["args"]
            assert isinstance(args, dict)
            number = int(str(args["volume"]))
            answers.append({"id": late["id"], "ok": {"usage": {**_USAGE, "used_bytes": number}}})
        return answers

    async with _connected(FakeGuest(reply), tmp_path) as inside:
        usages = await asyncio.gather(*(inside.usage(str(n)) for n in range(3)))
    assert [usage.used_bytes for usage in usages] == [0, 1, 2]


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"usage": {**_USAGE, "used_bytes": -1}},
        {"usage": {**_USAGE, "used_bytes": 2**63}},
        {"usage": {**_USAGE, "used_bytes": "40"}},
        {"usage": {**_USAGE, "used_bytes": 1.5}},
        {"usage": {**_USAGE, "surprise": 1}},
        {"usage": None},
    ],
)
async def test_malformed_answer_ends_the_connection(tmp_path: Path, result: object) -> None:
    async with _connected(FakeGuest(_ok(result)), tmp_path) as inside:
        with pytest.raises(faults.GuestProtocolViolation, match="answer to usage"):
            await inside.usage("v")
        with pytest.raises(faults.GuestProtocolViolation):
            await inside.ping()


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[]",
        b'{"id":"' + b"x" * 100 + b'"}',
        b'{"event":"reboot"}',
        b'{"id":1}',
        b"\xff\xfe",
        b"x" * (protocol.MAX_LINE + 1),
        b"[" * 50_000,
    ],
)
async def test_malformed_line_ends_the_connection(tmp_path: Path, line: bytes) -> None:
    async with _connected(FakeGuest(lambda _: [line]), tmp_path) as inside:
        with pytest.raises(faults.GuestProtocolViolation):
            await inside.usage("v")


@pytest.mark.parametrize(
    ("code", "branch"),
    [
        ("bad_request", errors.InvalidRequest),
        ("busy", errors.NotReady),
        ("conflict", errors.Conflict),
        ("corrupt", errors.Corrupt),
        ("exhausted", errors.Exhausted),
        ("internal", errors.RuntimeFailed),
        ("io_error", errors.RuntimeFailed),
        ("not_found", errors.NotFound),
        ("read_only", errors.Refused),
        ("refused", errors.Refused),
        ("timeout", errors.NotReady),
        ("unsupported", errors.Unsupported),
        ("invented", errors.RuntimeFailed),
    ],
)
async def test_guest_error_code_maps_to_error_class(
    tmp_path: Path, code: str, branch: type[errors.CrustError]
) -> None:
    error = {"code": code, "message": "evil\x1b[2J\nlog line", "hint": "h" * 4000}
    fake = FakeGuest(lambda request: [{"id": request["id"], "error": error}])
    async with _connected(fake, tmp_path) as inside:
        with pytest.raises(branch) as caught:
            await inside.usage("v")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


async def test_silent_guest_times_out_and_connection_stays_open(tmp_path: Path) -> None:
    def reply(request: dict[str, object]) -> list[object]:
        return [] if request["op"] == "ping" else _ok({"usage": _USAGE})(request)

    async with _connected(FakeGuest(reply), tmp_path) as inside:
        with pytest.raises(faults.AgentTimedOut, match="ping"):
            await inside.ping(timeout_s=0.05)
        assert (await inside.usage("v")).total_bytes == 100


async def test_guest_disconnect_fails_pending_and_later_requests(tmp_path: Path) -> None:
    fake = FakeGuest(lambda _: [])

    async with _connected(fake, tmp_path) as inside:
        asking = asyncio.create_task(inside.usage("v"))
        await fake.asked.wait()
        assert fake.writer is not None
        fake.writer.close()
        with pytest.raises(faults.AgentDisconnected):
            await asking
        with pytest.raises(faults.AgentDisconnected):
            await inside.ping()


async def test_other_protocol_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_HELLO, "protocol", 99)
    with pytest.raises(faults.GuestUnsupported, match="version"):
        async with _connected(FakeGuest(lambda _: []), tmp_path):
            pass


async def test_connect_without_listener_raises_agent_disconnected(tmp_path: Path) -> None:
    with pytest.raises(faults.AgentDisconnected):
        await agent.AgentClient.connect(tmp_path / "absent", 1)


def _output(data: bytes, stream: str = "stdout") -> dict[str, object]:
    encoded = base64.b64encode(data).decode()
    return {"event": "output", "container": "c", "stream": stream, "data": encoded}


def _starting(*events: object) -> Reply:
    def reply(request: dict[str, object]) -> list[object]:
        if request["op"] == "container.start":
            return [{"id": request["id"], "ok": {"pid": 5}}, *events]
        return [] if request["op"] == "container.credit" else [{"id": request["id"], "ok": {}}]

    return reply


_NO_SUCH = {"code": "not_found", "message": "", "hint": ""}
_EXIT = {"event": "exit", "container": "c", "code": 0, "signal": None}
_SPEC = values.ContainerSpec("c", ("true",))


async def test_output_is_read_in_order_and_its_credit_is_returned(tmp_path: Path) -> None:
    fake = FakeGuest(_starting(_output(b"a"), _output(b"b"), _output(b"e", "stderr"), _EXIT))
    async with _connected(fake, tmp_path) as inside:
        done = await inside.run(_SPEC)
    assert done == values.Completed(values.Exit(0, None), b"ab", b"e")
    paid = [r["args"] for r in fake.seen if r["op"] == "container.credit"]
    assert sum(a["credit"] for a in paid if isinstance(a, dict)) == 3


@pytest.mark.parametrize(
    "event",
    [
        {"event": "output", "container": "c", "stream": "stdout", "data": "%%%"},
        {"event": "output", "container": "c", "stream": "stdin", "data": ""},
        {"event": "exit", "container": "c", "code": "zero", "signal": None},
    ],
)
async def test_malformed_event_ends_the_connection(tmp_path: Path, event: object) -> None:
    async with _connected(FakeGuest(_starting(event)), tmp_path) as inside:
        with pytest.raises(faults.GuestProtocolViolation):
            await (await inside.start(_SPEC)).wait()


async def test_output_beyond_the_window_is_a_protocol_violation(tmp_path: Path) -> None:
    piece = _output(b"x" * 65536)
    flood = [piece] * (containers.WINDOW // 65536 + 1)
    async with _connected(FakeGuest(_starting(*flood)), tmp_path) as inside:
        container = await inside.start(_SPEC)
        with pytest.raises(faults.GuestProtocolViolation, match="more output"):
            await inside.ping()
        assert container._held <= containers.WINDOW + 65536


async def test_events_of_an_unknown_container_are_dropped(tmp_path: Path) -> None:
    unknown = {**_output(b"x"), "container": "other"}
    async with _connected(FakeGuest(_starting(unknown, _EXIT)), tmp_path) as inside:
        assert (await inside.run(_SPEC)).stdout == b""


async def test_fs_group_has_no_deadline_while_it_makes_progress(tmp_path: Path) -> None:
    """A tree of millions of files takes hours, longer than any deadline; a retry would begin again."""
    answers = [{"done": n == 50, "owned_entries": 7 * n} for n in range(1, 51)]

    def reply(request: dict[str, object]) -> list[object]:
        return [{"id": request["id"], "ok": answers.pop(0)}]

    async with _connected(FakeGuest(reply), tmp_path) as inside:
        owned = await inside.own("v", values.FsGroup(7), stalled_s=20)
    assert (owned.done, owned.owned_entries, answers) == (True, 350, [])


async def test_fs_group_without_progress_times_out(tmp_path: Path) -> None:
    async with _connected(FakeGuest(_ok({"done": False, "owned_entries": 7})), tmp_path) as inside:
        with pytest.raises(faults.AgentTimedOut, match="own"):
            await inside.own("v", values.FsGroup(7), stalled_s=0.2)


@pytest.mark.parametrize(
    "line",
    [
        {"id": "x", "ok": {"a": [{"b": 1}] * 100}},
        {"event": "output", "container": "other", "stream": "stdout", "data": "eA=="},
        {"event": "output", "container": "c", "stream": "stdout", "data": ""},
        {"id": None, "error": {"code": "internal", "message": "", "hint": ""}},
    ],
)
async def test_messages_that_nobody_asked_for_end_the_connection(
    tmp_path: Path, line: object
) -> None:
    """One event loop serves all sandboxes: a guest that writes without end would stop the others."""
    fake = FakeGuest(_starting(*[line] * 1000))
    async with _connected(fake, tmp_path) as inside:
        container = await inside.start(_SPEC)
        with pytest.raises(faults.GuestProtocolViolation, match="nobody asked for"):
            await container.wait()


async def test_unread_output_of_container_is_no_violation(
    tmp_path: Path,
) -> None:
    """Its start was given up, and its credit is spent one byte at a time."""
    late = [_output(b"x")] * 1000

    def reply(request: dict[str, object]) -> list[object]:
        if request["op"] == "container.start":
            return [*late, {"id": request["id"], "error": _NO_SUCH}]
        return [*late, {"id": request["id"], "ok": {}}]

    async with _connected(FakeGuest(reply), tmp_path) as inside:
        with pytest.raises(errors.NotFound):
            await inside.start(_SPEC)
        await inside.ping()


async def test_guest_over_its_pace_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s = [0.0, 3600.0]  # after hello, after the first answer
    monkeypatch.setattr(budget.MessageBudget, "spend", lambda *_: waits_s.pop(0))
    async with _connected(FakeGuest(_ok({})), tmp_path) as inside:
        await inside.ping()
        with pytest.raises(faults.AgentTimedOut):
            await inside.ping(timeout_s=0.1)
