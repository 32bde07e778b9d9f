"""The processes of a host, each in the host's network, with a settings file and a log of its own."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.cluster.network import Host
from examples.kata.demo.node import Process


class Programs:
    """The running processes of one host, by name."""

    def __init__(self, host: Host, base: Path) -> None:
        self.host = host
        self.base = base
        self._running: dict[str, Process] = {}
        self._started: dict[str, tuple[str, ...]] = {}

    async def start(self, name: str, *module_and_arguments: str) -> None:
        """Start `python -m …`, or again with the arguments of before; its output is appended to its log."""
        arguments = module_and_arguments or self._started[name]
        self._started[name] = arguments
        self.base.mkdir(parents=True, exist_ok=True)
        command = self.host.command(sys.executable, "-m", *arguments)
        self._running[name] = await Process.run(self.base / f"{name}.log", *command)

    def settings(self, name: str, settings: Mapping[str, Any]) -> str:
        """Write a program's settings; returns the flag that names the file."""
        self.base.mkdir(parents=True, exist_ok=True)
        path = self.base / f"{name}.toml"
        path.write_text("".join(_toml(settings)))
        return f"--config={path}"

    async def kill(self, name: str) -> None:
        """SIGKILL, and wait until it has ended."""
        await self._running.pop(name).kill()

    async def stop_all(self) -> None:
        """Stop the processes, the newest first."""
        for name in reversed(tuple(self._running)):
            await self._running.pop(name).stop()

    def log_tail(self, name: str, lines: int = 12) -> str:
        """The last lines of a process's log."""
        path = self.base / f"{name}.log"
        return "\n".join(path.read_text().splitlines()[-lines:]) if path.exists() else ""

    def names(self) -> tuple[str, ...]:
        """Of all processes that were started."""
        return tuple(self._started)


def _toml(settings: Mapping[str, Any], table: str = "") -> list[str]:
    """Scalars, lists of scalars, and tables; JSON's strings, numbers and lists are TOML's too."""
    lines = [f"[{table}]\n"] if table else []
    tables = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    for key, value in settings.items():
        if key not in tables:
            lines.append(f"{key} = {json.dumps(value)}\n")
    for key, value in tables.items():
        lines += _toml(value, key)
    return lines
