"""The end of a container of another runtime that runs on a guard mount."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.kata.gate import end_container
from crust.kata.nri import Container
from tests.support.raised import raised


@pytest.fixture
def program() -> Iterator["subprocess.Popen[bytes]"]:
    """The first process of a container."""
    with subprocess.Popen(["sleep", "infinity"]) as process:
        yield process
        process.kill()


def _of_group(pid: int) -> Container:
    """A container whose id is in the control group of the process."""
    group = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines()[0]
    return Container(group, "sandbox-0001", "app", (), is_running=True, pid=pid)


def test_process_of_the_container_is_killed(program: "subprocess.Popen[bytes]") -> None:
    assert end_container(_of_group(program.pid))
    assert program.wait(60) == -signal.SIGKILL


def test_process_of_another_control_group_is_not_killed(
    program: "subprocess.Popen[bytes]",
) -> None:
    """The number may be another process's by now, or Kata's virtual machine."""
    stranger = Container("container-0001", "sandbox-0001", "app", (), pid=program.pid)
    with raised("NotOfContainer"):
        end_container(stranger)
    assert program.poll() is None


def test_container_without_a_process_is_not_ended(program: "subprocess.Popen[bytes]") -> None:
    gone = _of_group(program.pid)
    program.kill()
    program.wait(60)
    assert not end_container(gone)
    assert not end_container(Container("container-0001", "sandbox-0001", "app", ()))
