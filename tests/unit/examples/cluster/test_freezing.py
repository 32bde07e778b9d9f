"""A process that was frozen does nothing any more when the call returns."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.cluster import freezing

_BUSY = """
import hashlib, threading
def work():
    while True:
        hashlib.sha256(bytes(1 << 20))  # without the interpreter's lock
for _ in range(16):
    threading.Thread(target=work).start()
print("busy", flush=True)
"""


@pytest.fixture
def busy() -> Iterator["subprocess.Popen[bytes]"]:
    """A process whose threads are more than the host's processors."""
    process = subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def _states(pid: int) -> set[str]:
    return {
        (path / "stat").read_text().rpartition(")")[2].split()[0]
        for path in Path(f"/proc/{pid}/task").iterdir()
    }


def test_no_thread_runs_when_the_call_returns(busy: "subprocess.Popen[bytes]") -> None:
    for _ in range(10):
        freezing.freeze(busy.pid)
        assert _states(busy.pid) == {"T"}
        busy.send_signal(signal.SIGCONT)
