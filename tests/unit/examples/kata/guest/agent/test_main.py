"""The agent's main loop."""

import json
import threading
from collections.abc import Callable

from examples.kata.guest.agent import main, protocol, requests


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
