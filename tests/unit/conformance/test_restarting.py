"""The restart command: it may leave a driver behind that writes to its output, and its failures are told."""

import os
import signal
from pathlib import Path

import pytest

from crust.conformance import restarting


def test_what_it_starts_may_go_on_with_its_output(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    try:
        restarting.run(f"sleep 600 & echo $! > {pid}", 60.0)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_command_that_fails_is_told_with_what_it_said() -> None:
    with pytest.raises(AssertionError, match="ended with 3: no such driver"):
        restarting.run("echo no such driver >&2; exit 3", 60.0)


def test_a_command_that_does_not_return_is_told() -> None:
    with pytest.raises(AssertionError, match=r"did not return within 0\.2 s: it said nothing"):
        restarting.run("exec sleep 600", 0.2)
