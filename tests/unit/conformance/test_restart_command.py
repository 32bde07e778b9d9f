"""The restart command: the driver that it starts may keep its output open, and its failures are reported."""

import os
import signal
from pathlib import Path

import pytest

from crust.conformance import restart_command


def test_restart_command_may_leave_its_output_open(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    try:
        restart_command.run(f"sleep 600 & echo $! > {pid}", 60.0)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_failed_restart_command_is_reported_with_its_output() -> None:
    with pytest.raises(AssertionError, match="ended with 3: no such driver"):
        restart_command.run("echo no such driver >&2; exit 3", 60.0)


def test_hanging_restart_command_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"did not return within 0\.2 s: it printed nothing"):
        restart_command.run("exec sleep 600", 0.2)
