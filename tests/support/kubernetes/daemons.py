"""The programs of a cluster as processes that say when they serve, as systemd would start them.

`make kubernetes` builds them; third_party/kubernetes has their versions. A test kills one, and starts it again.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[3] / ".cache" / "kubernetes" / "bin"
PATH = f"{PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 120.0
"""For a start on a machine that does other work too. It is only waited for in a failure."""


@dataclass(slots=True)
class Daemon:
    """A program with its log. `notifies`: it tells systemd's socket when it serves (sd_notify(3))."""

    command: tuple[str, ...]
    directory: Path
    notifies: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside that of the tests."""
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    @property
    def name(self) -> str:
        return Path(self.command[0]).name

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    def start(self) -> None:
        """Return when it serves, if it says so."""
        address = self.directory / f"{self.name}.notify"
        address.unlink(missing_ok=True)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified,
            self.log.open("ab") as log,
        ):
            notified.bind(str(address))
            notified.settimeout(START_S)
            given = {"PATH": PATH, "NOTIFY_SOCKET": str(address)}
            environment = {**os.environ, **given, **self.environment}
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=log, cwd=self.directory, env=environment
            )
            while self.notifies and not self._serves(notified):
                pass

    def _serves(self, notified: socket.socket) -> bool:
        try:
            return b"READY=1" in notified.recv(4096).splitlines()
        except TimeoutError:
            raise AssertionError(f"{self.name} does not serve: {self.text()[-4000:]}") from None

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @contextmanager
    def running(self) -> Iterator[None]:
        """It runs while the block does, and is killed then, if it has not ended."""
        try:
            self.start()
            yield
        finally:
            if self._process is not None:
                self.end()

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, and wait until it has ended."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(START_S)
