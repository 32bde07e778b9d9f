"""crust as units of systemd, on a machine that a real systemd has booted."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from crust.core.volumes import HandlerFeature
from tests.support.booted_systemd import CHECKOUT, ENVIRONMENT, Machine
from tests.support.forms import kata_beside
from tests.support.forms.form import TARGET, Form

ONE = ("crust-node",)
THREE = ("crust-driver", "crust-shim", "crust-proxy")


@dataclass
class Units(Form):
    """A machine on which these units serve."""

    machine: Machine
    units: tuple[str, ...] = ONE

    @property
    def root(self) -> Path:
        return self.machine.root

    @property
    def python(self) -> str:
        return f"{ENVIRONMENT}/bin/python"

    @property
    def processes(self) -> tuple[str, ...]:
        return self.units

    def kill(self, process: str) -> None:
        self.output("systemctl", "kill", "--kill-who=main", "--signal=KILL", process)

    def seen(self, path: str) -> str:
        return self.machine.seen(path)

    def reboot(self) -> None:
        self.machine.boot()
        self.serve()

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return self.machine.run(*command)

    def crust(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return self.machine.run("crust", *words)

    def running(self, *command: str) -> AbstractContextManager["subprocess.Popen[str]"]:
        return self.machine.running(*command)

    def serve(self) -> None:
        """Start these units: they alone serve then."""
        self.output("systemctl", "start", *self.units)
        for unit in {*ONE, *THREE}:
            active = self.run("systemctl", "is-active", unit).stdout.strip()
            assert active == ("active" if unit in self.units else "inactive"), unit

    def main_pid(self, unit: str) -> str:
        shown = self.output("systemctl", "show", "--property=MainPID", "--value", unit)
        return shown.strip()


class KataUnits(Units):
    """With `crust-kata`, beside stand-ins of containerd and Kata (`tests.support.forms.kata_beside`)."""

    _beside: "subprocess.Popen[str] | None" = None

    @asynccontextmanager
    async def handler(
        self, features: frozenset[HandlerFeature] | None = None
    ) -> AsyncIterator[None]:
        """The unit registers the runtime, with its own features; the engine has accepted the unit's plugin."""
        program = (f"{CHECKOUT}/.venv/bin/python", "-m", kata_beside.__name__)
        with self.running("env", f"--chdir={CHECKOUT}", *program) as process:
            self._beside = process
            answer = await asyncio.to_thread(self._answer)
            assert answer == "registered", answer
            await self.until_registered()
            yield

    @contextmanager
    def sandbox(self, target: str = TARGET, error: str = "") -> Iterator[str]:
        """A sandbox that Kata has started a container in; its virtual machine is killed at the end.

        With `error` Kata's shim has ended before the block, and crust kata has reported that by itself.
        """
        self._tell(f"claim {target}")
        device = self._answer()
        assert device.startswith("/dev/"), device
        if error:
            self._do("orphan", target, "orphaned")
        yield device
        self._do("kill", target)

    def end_container_of_another_user(self, target: str = TARGET) -> None:
        """One of another runtime, on the guard mount of a volume: crust kata ends it."""
        self._do("other", target)

    def _do(self, word: str, target: str, done: str = "killed") -> None:
        self._tell(f"{word} {target}")
        answer = self._answer()
        assert answer == done, answer

    def _tell(self, line: str) -> None:
        assert self._beside is not None
        assert self._beside.stdin is not None
        self._beside.stdin.write(f"{line}\n")
        self._beside.stdin.flush()

    def _answer(self) -> str:
        assert self._beside is not None
        assert self._beside.stdout is not None
        line = self._beside.stdout.readline().strip()
        if line in ("registered", "orphaned", "killed") or line.startswith("/dev/"):
            return line
        return f"{line}\n{self._beside.stdout.read()}"  # it has failed, and ends
