"""crust.host.process.processes: a process is its pid and its start, and only the kernel says that it has ended."""

import errno
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from crust.host import answers
from crust.host.process import processes
from crust.host.process.processes import Process
from tests.support.waiting_processes import no_free_descriptor


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "inf"]) as process:
        yield process
        process.kill()


def _process(pid: int) -> Process:
    process = answers.seen(processes.of(pid))
    assert process is not None
    return process


def _number_of_a_session_whose_leader_has_ended() -> tuple[int, int]:
    """The leader's pid, and the pipe whose end ends the session."""
    end_read, end_write = os.pipe()
    leader = os.fork()
    if leader == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(end_write)
            os.read(end_read, 1)
        os._exit(0)
    os.close(end_read)
    os.waitpid(leader, 0)
    return leader, end_write


def test_process_that_runs_is_held_by_its_pid_and_start(child: subprocess.Popen[bytes]) -> None:
    process = _process(child.pid)
    assert not processes.has_ended(process)
    with processes.holding(process) as pidfd:
        assert pidfd is not None
        assert not processes.is_over(pidfd)
        child.kill()
        assert select.select([pidfd], [], [], 60)[0]
        assert processes.is_over(pidfd)


def test_process_that_is_not_reaped_has_ended(child: subprocess.Popen[bytes]) -> None:
    process = _process(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.has_ended(process)
    assert processes.of(child.pid) == answers.Absent()


def test_reaped_process_has_ended(child: subprocess.Popen[bytes]) -> None:
    process = _process(child.pid)
    child.kill()
    child.wait()
    assert processes.has_ended(process)


def test_stopped_process_is_seen_until_it_goes_on_or_ends(child: subprocess.Popen[bytes]) -> None:
    process = _process(child.pid)
    assert processes.state(process) != answers.Present("T")
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert processes.state(process) == answers.Present("T")
    child.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    assert processes.state(process) != answers.Present("T")
    child.kill()
    child.wait()
    assert processes.state(process) == answers.Absent()


def test_pid_of_another_start_is_another_process(child: subprocess.Popen[bytes]) -> None:
    """The pid was used again: a process with the number runs, and it is not this one."""
    earlier = Process(child.pid, _process(child.pid).started - 1)
    assert processes.has_ended(earlier)
    assert processes.hold(earlier) == answers.Absent()


def test_pid_that_only_a_session_has_is_of_ended_process() -> None:
    pid, end_write = _number_of_a_session_whose_leader_has_ended()
    try:
        assert processes.has_ended(Process(pid, 1))
    finally:
        os.close(end_write)


def test_pid_that_a_thread_has_is_of_ended_process() -> None:
    go_on, numbers = threading.Event(), []

    def thread() -> None:
        numbers.append(threading.get_native_id())
        began.set()
        go_on.wait(60)

    began, running = threading.Event(), threading.Thread(target=thread)
    running.start()
    try:
        assert began.wait(60)
        assert processes.has_ended(Process(numbers[0], 1))
    finally:
        go_on.set()
        running.join()


def test_no_free_descriptor_is_no_answer(child: subprocess.Popen[bytes]) -> None:
    process = _process(child.pid)
    with no_free_descriptor():
        answer, same = processes.hold(process), processes.of(child.pid)
        with pytest.raises(answers.NotSeen, match="EMFILE"):
            processes.has_ended(process)
    assert isinstance(answer, answers.Unseen)
    assert isinstance(same, answers.Unseen)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENOSYS, errno.EIO])
def test_errno_of_the_look_at_proc_is_no_answer(
    number: int, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _process(child.pid)

    def refused(path: str) -> bytes:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr("crust.host.process.syscalls.read_whole", refused)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(answers.NotSeen, match=errno.errorcode[number]):
        processes.has_ended(process)
    assert len(os.listdir("/proc/self/fd")) == before
