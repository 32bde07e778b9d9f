"""The guest agent's requests: what hangs stops nothing else, and equal questions share one run."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.kata.guest.agent import freeze, fs_group, main, ownership, protocol, requests


def _begin(known: requests.Requests, number: int, operation: str, **args: object) -> requests.Run:
    run = known.begin(str(number), operation, args)
    assert run is not None
    return run


def test_hung_statistics_of_one_volume_use_one_slot() -> None:
    known = requests.Requests()
    hung = _begin(known, 0, "usage", volume="v")
    for number in range(1, requests.WAITERS):
        assert known.begin(str(number), "usage", {"volume": "v"}) is None
    with pytest.raises(protocol.Fault, match="wait for usage v"):
        known.begin("late", "usage", {"volume": "v"})
    assert known.end(hung) == [str(number) for number in range(requests.WAITERS)]
    _begin(known, 9, "usage", volume="v")


def test_volume_without_slots_stops_no_other_and_no_thaw() -> None:
    known = requests.Requests()
    hung = [_begin(known, n, "mount", volume="v", timeout_s=n) for n in range(requests.SLOTS)]
    with pytest.raises(protocol.Fault, match="requests of v"):
        known.begin("more", "usage", {"volume": "v"})
    _begin(known, 20, "usage", volume="w")
    _begin(known, 21, "thaw", volume="v")
    _begin(known, 22, "shutdown")
    _begin(known, 23, "container.kill", container="c", signal=9)
    known.end(hung[0])
    _begin(known, 24, "usage", volume="v")


def test_thaw_is_not_answered_by_one_that_began_before_freeze() -> None:
    known = requests.Requests()
    first = _begin(known, 1, "thaw", volume="v")
    assert known.begin("2", "thaw", {"volume": "v"}) is None
    _begin(known, 3, "freeze", volume="v", thaw_after_s=9)
    second = _begin(known, 4, "thaw", volume="v")
    assert (known.end(first), known.end(second)) == (["1", "2"], ["4"])


def test_input_of_a_container_is_never_joined() -> None:
    known = requests.Requests()
    _begin(known, 1, "container.stdin", container="c", data="eA==")
    _begin(known, 2, "container.stdin", container="c", data="eA==")


class _Agent(main.Agent):
    """An agent without a guest: its operations are the test's, and what it sends is a list."""

    def __init__(self, operations: dict[str, Callable[[protocol.Args], dict[str, object]]]) -> None:
        self._requests = requests.Requests()
        self._operations = {"ping": self._ping, **operations}
        self.sent: list[dict[str, object]] = []
        self.changed = threading.Condition()

    def _send(self, message: dict[str, object]) -> None:
        with self.changed:
            self.sent.append(message)
            self.changed.notify_all()

    def ask(self, number: int, operation: str, **args: object) -> None:
        line = json.dumps({"id": str(number), "op": operation, "args": args})
        self._take(line.encode())

    def answer(self, number: int) -> object:
        """The answer to a request, once it is there."""
        with self.changed:
            assert self.changed.wait_for(lambda: self._answers(number), 20)
            (answer,) = self._answers(number)
        return answer.get("ok") or answer["error"]

    def _answers(self, number: int) -> list[dict[str, object]]:
        return [message for message in self.sent if message["id"] == str(number)]


def test_agent_thaws_and_answers_pings_while_every_statistics_call_hangs() -> None:
    released = threading.Event()

    def hang(_: protocol.Args) -> dict[str, object]:
        released.wait()
        return {"used": 1}

    agent = _Agent({"usage": hang, "thaw": lambda _: {"was_frozen": True}})
    for number in range(200):
        agent.ask(number, "usage", volume=f"v{number % 8}")
    agent.ask(500, "thaw", volume="v0")
    agent.ask(501, "ping")
    assert agent.answer(500) == {"was_frozen": True}
    assert {"id": "501", "ok": {}} in agent.sent
    released.set()
    assert agent.answer(0) == {"used": 1}
    assert agent.answer(8) == {"used": 1}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for number in range(10):
        (tmp_path / str(number)).write_text("x")
    return tmp_path


def _change(tree: Path, volume_freeze: freeze.VolumeFreeze) -> ownership.GroupChange:
    gid = tree.stat().st_gid
    return ownership.GroupChange(str(tree), gid, fs_group.ALWAYS, volume_freeze)


def test_group_change_reports_its_progress_and_its_end(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_BATCH", 3)
    change = _change(tree, freeze.VolumeFreeze())
    assert change.progress(20) == {"done": True, "owned_entries": 11}


def test_group_change_lets_freeze_in_between_and_can_be_cancelled(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_BATCH", 1)
    volume_freeze = freeze.VolumeFreeze()
    with volume_freeze.changing():
        volume_freeze._freezing = True  # a freeze waits for this change, and goes first
    change = _change(tree, volume_freeze)
    assert change.progress(0) == {"done": False, "owned_entries": 0}
    change._cancelled = True
    with volume_freeze.lock:
        volume_freeze._freezing = False
        volume_freeze.lock.notify_all()
    change.cancel()
    with pytest.raises(protocol.Fault, match="ended before"):
        change.progress(0)


def test_group_change_that_fails_says_so_to_who_asks(tmp_path: Path) -> None:
    change = ownership.GroupChange(
        str(tmp_path / "absent"), 1, fs_group.ALWAYS, freeze.VolumeFreeze()
    )
    with pytest.raises(protocol.Fault, match="not_found"):
        change.progress(20)
    assert change.failed
