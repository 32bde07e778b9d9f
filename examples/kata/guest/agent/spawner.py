"""The agent's connection to PID 1, which starts and reaps containers (the messages are in init.py)."""

from __future__ import annotations

import array
import itertools
import json
import socket
import threading

from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from . import jail


class Spawner:
    """The connection to PID 1."""

    def __init__(self, line: socket.socket, on_exit: Callable[[int, int], None]) -> None:
        self._line = line
        self._on_exit = on_exit
        self._numbers = itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def spawn(self, spec: jail.Spec, fds: list[int]) -> int:
        """Start a container and return its pid. Faults: those of jail.enter and exec."""
        number = next(self._numbers)
        message = json.dumps({"id": number, "spec": spec}).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        self._line.sendmsg([message], [rights])
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers)
            answer = self._answers.pop(number)
        if "error" in answer:
            raise protocol.Fault(*answer["error"])
        pid: int = answer["pid"]
        return pid

    def kill(self, pid: int, number: int) -> None:
        """Send a signal; PID 1 knows whether the pid is still that container."""
        self._line.send(json.dumps({"kill": pid, "signal": number}).encode())

    def _listen(self) -> None:
        while data := self._line.recv(128 * 1024):
            message = json.loads(data)
            if "status" in message:
                self._on_exit(message["pid"], message["status"])
                continue
            with self._changed:
                self._answers[message["id"]] = message
                self._changed.notify_all()
