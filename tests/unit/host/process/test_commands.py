"""Other programs: what comes back, and that none is left."""

import asyncio
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


def ends(pidfd: int) -> bool:
    """Wait until the process of a pidfd is dead; False if it lives on."""
    readable, _, _ = select.select([pidfd], [], [], LONG_S)
    os.close(pidfd)
    return bool(readable)


async def started(argv: list[str], tmp_path: Path) -> tuple[asyncio.Task[commands.Completed], int]:
    """Run a program that writes a process id into the file named by its last argument; that process's pidfd."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    task = asyncio.create_task(commands.run([*argv, str(ready)], timeout_s=LONG_S))
    return task, os.pidfd_open(int(await asyncio.to_thread(ready.read_text)))


async def test_run_passes_only_the_inherited_descriptors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fds = [os.open(tmp_path / "file", os.O_RDONLY | os.O_CLOEXEC) for _ in range(2)]
    look = ["sh", "-c", f"readlink /proc/self/fd/{fds[0]}; readlink /proc/self/fd/{fds[1]}; true"]
    done = await commands.run(look, timeout_s=LONG_S, inherits=fds[:1])
    assert done.stdout.decode() == f"{tmp_path}/file\n"
    for fd in fds:
        os.close(fd)


async def test_run_gives_an_empty_input_and_passes_much_output() -> None:
    code = "import sys; sys.stdout.write(sys.stdin.read() + 'x' * 300_000)"
    done = await commands.run(python(code), timeout_s=LONG_S)
    assert (done.code, len(done.stdout)) == (0, 300_000)


async def test_run_sets_a_small_environment_with_c_locale() -> None:
    done = await commands.run(["env"], timeout_s=LONG_S)
    names = {line.split(b"=")[0] for line in done.stdout.splitlines()}
    assert b"LC_ALL=C" in done.stdout.splitlines()
    assert names == {b"LC_ALL", b"PATH"}


async def test_run_uses_a_session_of_its_own() -> None:
    done = await commands.run(
        python("import os; print(os.getsid(0) == os.getpid())"), timeout_s=LONG_S
    )
    assert done.stdout == b"True\n"


async def test_run_failure_has_status_and_stderr_tail() -> None:
    code = "import sys; sys.stderr.write('x' * 10000 + 'the end'); sys.exit(3)"
    with pytest.raises(commands.CommandFailed, match="exited with 3") as caught:
        await commands.run(python(code), timeout_s=LONG_S)
    assert caught.value.code == 3
    assert caught.value.stderr_tail.endswith("the end")
    assert len(caught.value.stderr_tail) == commands.STDERR_TAIL_BYTES


async def test_run_accepts_a_declared_exit_status() -> None:
    assert (
        await commands.run(python("raise SystemExit(1)"), timeout_s=LONG_S, ok=(0, 1))
    ).code == 1


async def test_run_reports_death_by_signal() -> None:
    with pytest.raises(commands.CommandFailed, match="signal 9"):
        await commands.run(python("import os; os.kill(os.getpid(), 9)"), timeout_s=LONG_S)


async def test_run_of_a_missing_program_names_its_package() -> None:
    with raised("CommandMissing", match="e2fsprogs"):
        await commands.run(["/nonexistent/mkfs.ext4"], timeout_s=LONG_S)


async def test_run_of_a_file_that_is_not_executable_fails(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")
    with pytest.raises(errors.Refused):
        await commands.run([str(tmp_path / "data")], timeout_s=LONG_S)


async def test_run_past_the_deadline_ends_the_program() -> None:
    with raised("CommandTimedOut", match=r"within 0.2 s"):
        await commands.run(["sleep", "600"], timeout_s=0.2)


async def test_run_with_output_left_open_ends_at_the_deadline() -> None:
    """The wait is for the output's end too, which a child in the background holds open."""
    with raised("CommandTimedOut"):
        await commands.run(["sh", "-c", "sleep 600 & exit 0"], timeout_s=0.5)


async def test_run_cancelled_returns_only_after_the_program_ended(tmp_path: Path) -> None:
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    task, pidfd = await started(python(code), tmp_path)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert select.select([pidfd], [], [], 0)[0]
    os.close(pidfd)


async def test_run_past_the_deadline_ends_child_processes_too(tmp_path: Path) -> None:
    """A formatter that outlived its call would format a device that someone else has by then."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    task, pidfd = await started(python(code), tmp_path)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ends, pidfd)


async def test_run_cancelled_while_the_program_starts_ends_it_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio then kills the leader alone, and waits for the pipes, which a child holds open without end."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    pids: list[int] = []
    pidfds: list[int] = []

    class Cancelled(subprocess.Popen[bytes]):
        """A program that has a child before asyncio has its pipes; its caller leaves then."""

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
    task = asyncio.create_task(commands.run(["sh", "-c", code], timeout_s=LONG_S))
    await asyncio.wait([task], timeout=LONG_S)
    assert task.cancelled(), "it waits without end"
    assert await asyncio.to_thread(ends, pidfds[0])


async def test_run_kills_a_program_that_ignores_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_GRACE_S", 0.1)
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    task, pidfd = await started(python(code), tmp_path)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ends, pidfd)


async def test_endless_output_fails_with_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output exceeds asyncio's buffer: asyncio reports the exit only once all of it was read."""
    start = commands._start

    async def start_and_fill(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*args, **options)
        while not process.stdout._paused:  # type: ignore[union-attr]  # noqa: ASYNC110
            await asyncio.sleep(0)
        return process

    monkeypatch.setattr(commands, "_start", start_and_fill)
    argv = ["sh", "-c", "exec 2>&-; exec yes"]
    monkeypatch.setattr(commands, "OUTPUT_LIMIT_BYTES", 1000)
    with pytest.raises(commands.CommandFailed, match="more than 1000 bytes"):
        await commands.run(argv, timeout_s=LONG_S)
