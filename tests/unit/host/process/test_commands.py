"""Other programs: what comes back, and that none is left."""

import asyncio
import errno
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from crust.core import errors
from crust.host.process import commands
from tests.support.raised import raised

pytestmark = pytest.mark.usefixtures("strict_event_loop")


LONG_S = 60.0


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def ends(pidfd: int, within_s: float = LONG_S) -> bool:
    """Wait until the process of a pidfd is dead; False if it lives on."""
    readable, _, _ = select.select([pidfd], [], [], within_s)
    os.close(pidfd)
    return bool(readable)


async def started(argv: list[str], tmp_path: Path) -> tuple[asyncio.Task[commands.Completed], int]:
    """Run a program that writes a process id into the file named by its last argument; that process's pidfd."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    task = asyncio.create_task(commands.run_command([*argv, str(ready)], timeout_s=LONG_S))
    return task, os.pidfd_open(int(await asyncio.to_thread(ready.read_text)))


async def test_run_passes_only_the_inherited_descriptors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fds = [os.open(tmp_path / "file", os.O_RDONLY | os.O_CLOEXEC) for _ in range(2)]
    look = ["sh", "-c", f"readlink /proc/self/fd/{fds[0]}; readlink /proc/self/fd/{fds[1]}; true"]
    done = await commands.run_command(look, timeout_s=LONG_S, inherits=fds[:1])
    assert done.stdout.decode() == f"{tmp_path}/file\n"
    for fd in fds:
        os.close(fd)


async def test_run_has_empty_input_small_environment_and_own_session() -> None:
    code = (
        "import os, sys; print(repr(sys.stdin.read()), os.getsid(0) == os.getpid(), os.environ['LC_ALL'], "
        "*sorted(os.environ.keys() - {'LC_CTYPE'})); sys.stdout.write('x' * 300_000)"
    )
    done = await commands.run_command(python(code), timeout_s=LONG_S)
    assert done.code == 0
    line, _, rest = done.stdout.partition(b"\n")
    assert line == b"'' True C LC_ALL PATH"
    assert rest == b"x" * 300_000


async def test_run_finds_no_program_below_usr_local() -> None:
    """On some distributions users other than root may write there."""
    done = await commands.run_command(["sh", "-c", "echo $PATH"], timeout_s=LONG_S)
    assert done.stdout == b"/usr/sbin:/usr/bin:/sbin:/bin\n"


async def test_run_failure_has_status_and_stderr_tail() -> None:
    code = "import sys; sys.stderr.write('x' * 10000 + 'the end'); sys.exit(3)"
    with pytest.raises(commands.CommandFailed, match="exited with 3") as caught:
        await commands.run_command(python(code), timeout_s=LONG_S)
    assert caught.value.stderr_tail.endswith("the end")
    assert len(caught.value.stderr_tail) == commands.STDERR_TAIL_BYTES
    assert (await commands.run_command(python(code), timeout_s=LONG_S, ok=(0, 3))).code == 3
    with pytest.raises(commands.CommandFailed, match="signal 9"):
        await commands.run_command(python("import os; os.kill(os.getpid(), 9)"), timeout_s=LONG_S)


async def test_run_of_a_program_that_cannot_start_says_why(tmp_path: Path) -> None:
    with raised("CommandMissing", match="e2fsprogs"):
        await commands.run_command(["/nonexistent/mkfs.ext4"], timeout_s=LONG_S)
    (tmp_path / "data").write_bytes(b"x")
    with pytest.raises(errors.Refused):
        await commands.run_command([str(tmp_path / "data")], timeout_s=LONG_S)


@pytest.mark.parametrize(
    "argv",
    [
        ["sleep", "600"],
        ["sh", "-c", "sleep 600 & exit 0"],
        ["sh", "-c", "exec >&-; exec sleep 600"],
    ],
    ids=["itself", "its child", "without output"],
)
async def test_run_past_the_deadline_ends_the_program(argv: list[str]) -> None:
    """The wait is for the output's end too, which a child in the background holds open."""
    with raised("CommandTimedOut", match=r"within 0.2 s"):
        await commands.run_command(argv, timeout_s=0.2)


@pytest.mark.parametrize(
    "code",
    [
        "note(os.getpid())",
        # a formatter that outlived its call would format a device that someone else has by then
        "note(subprocess.Popen(['sleep', '600']).pid)",
        "note(subprocess.Popen(['sleep', '600']).pid); os._exit(0)",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); note(os.getpid())",
    ],
    ids=["itself", "its child", "the child that it left", "without SIGTERM"],
)
async def test_run_cancelled_returns_only_after_the_program_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(commands, "_GRACE_S", 0.1)
    program = (
        "import os, signal, subprocess, sys, time\n"
        "def note(pid): open(sys.argv[1], 'w').write(str(pid))\n"
        f"{code}; time.sleep(600)"
    )
    task, pidfd = await started(python(program), tmp_path)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ends, pidfd, LONG_S if "Popen" in code else 0)


async def test_run_cancelled_while_program_starts_ends_it_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    pids: list[int] = []
    pidfds: list[int] = []

    class Cancelled(subprocess.Popen[bytes]):
        """A program that has a child when its start returns; its caller leaves then."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            reader = threading.Thread(target=lambda: pids.append(int(ready.read_text())))
            reader.start()
            while reader.is_alive():  # the loop must not go on meanwhile
                os.sched_yield()
            pidfds.append(os.pidfd_open(pids[0]))
            task.cancel()

    monkeypatch.setattr(subprocess, "Popen", Cancelled)
    code = f"sleep 600 & echo $! > {ready}; wait"
    task = asyncio.create_task(commands.run_command(["sh", "-c", code], timeout_s=LONG_S))
    await asyncio.wait([task], timeout=LONG_S)
    assert task.cancelled(), "it waits without end"
    assert await asyncio.to_thread(ends, pidfds[0])


async def test_program_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no descriptor is free."""
    open_pidfd, pidfds = os.pidfd_open, list[int]()

    def refuse(pid: int) -> int:
        pidfds.append(open_pidfd(pid))
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(errors.Exhausted, match="cannot watch sleep"):
        await commands.run_command(["sleep", "600"], timeout_s=LONG_S)
    assert ends(pidfds[0], 0)


async def test_endless_output_fails_with_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "OUTPUT_LIMIT_BYTES", 1000)
    with pytest.raises(commands.CommandFailed, match="more than 1000 bytes"):
        await commands.run_command(["sh", "-c", "exec 2>&-; exec yes"], timeout_s=LONG_S)
    with pytest.raises(commands.CommandFailed, match="exited with 3"):
        await commands.run_command(["sh", "-c", "yes >&2; exit 3"], timeout_s=LONG_S)
