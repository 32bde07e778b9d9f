"""A program as a process that is killed and started again, by a test or by a shell command.

A file has the pid, because a shell may have started it. A killed program is dead when the last of its threads has
closed its files: until then it has its locks, and another one would wait. Also a program: `processes.py PID_FILE`.
"""

import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Program:
    """`python -m arguments…`, with its files below `base`; several may have one log."""

    base: Path
    name: str
    arguments: tuple[str, ...]
    log: Path

    @property
    def pid(self) -> Path:
        """The file with its process id."""
        return self.base / f"{self.name}.pid"

    @property
    def script(self) -> Path:
        return self.base / f"{self.name}.sh"

    @property
    def restart_command(self) -> str:
        """Kills it and starts it again."""
        return f"{sys.executable} {__file__} {self.pid} && sh {self.script}"

    def start(self) -> None:
        """Start it; callers wait until it serves."""
        command = shlex.join([sys.executable, "-m", *self.arguments])
        self.script.write_text(f"{command} >>{self.log} 2>&1 &\necho $! >{self.pid}\n")
        subprocess.run(["/bin/sh", str(self.script)], check=True, timeout=TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        kill(self.pid)

    def stop(self) -> None:
        """SIGTERM."""
        os.kill(int(self.pid.read_text()), signal.SIGTERM)


@contextmanager
def running(*programs: Program) -> Iterator[None]:
    """They run while the block does, and are killed then, the last one first."""
    with ExitStack() as stack:
        for program in programs:
            program.start()
            stack.callback(program.kill)
        yield


def kill(pid_file: Path) -> None:
    """Kill the process, and wait until it is dead; a dead process is a success."""
    with suppress(ProcessLookupError):
        end(int(pid_file.read_text()))


def end(*pids: int) -> None:
    """Send processes SIGKILL, and wait until all have ended."""
    with ending(*pids) as descriptors:
        for descriptor in descriptors:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)


@contextmanager
def ending(*pids: int) -> Iterator[list[int]]:
    """Wait after the block until these processes have ended; the block gets their descriptors."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        yield descriptors
        for pid, descriptor in zip(pids, descriptors, strict=True):
            assert select.select([descriptor], [], [], TIMEOUT_S)[0], f"process {pid} does not end"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    kill(Path(sys.argv[1]))
