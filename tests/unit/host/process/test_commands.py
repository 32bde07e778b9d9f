"""Other programs: what comes back, and that none is left; system calls, and the processes that lock a file."""

import asyncio
import errno
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import errors
from crust.host import answers
from crust.host.process import arguments, commands, open_files, syscalls, systemd
from crust.rpc import status
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


Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.ENOSPC, errors.Exhausted, Code.RESOURCE_EXHAUSTED),
        (errno.EDQUOT, errors.Exhausted, Code.RESOURCE_EXHAUSTED),
        (errno.EBUSY, errors.NotReady, Code.FAILED_PRECONDITION),
        (errno.EUCLEAN, errors.Corrupt, Code.DATA_LOSS),
        (errno.EIO, errors.RuntimeFailed, Code.INTERNAL),
        (errno.EINVAL, errors.RuntimeFailed, Code.INTERNAL),
        # alone it says nothing about the object of a call: a missing /dev/loop-control is no missing volume, and a
        # process without descriptors is no full node
        (errno.ENOENT, errors.NotFound, Code.INTERNAL),
        (errno.ENODEV, errors.RuntimeFailed, Code.INTERNAL),
        (errno.EACCES, errors.Refused, Code.INTERNAL),
        (errno.EPERM, errors.Refused, Code.INTERNAL),
        (errno.EROFS, errors.Refused, Code.INTERNAL),
        (errno.ELOOP, errors.Refused, Code.INTERNAL),
        (errno.EEXIST, errors.Conflict, Code.INTERNAL),
        (errno.EOPNOTSUPP, errors.Unsupported, Code.INTERNAL),
        (errno.ENAMETOOLONG, errors.InvalidRequest, Code.INTERNAL),
        (errno.ENOMEM, errors.Exhausted, Code.UNAVAILABLE),
        (errno.EMFILE, errors.Exhausted, Code.UNAVAILABLE),
        (errno.EXFULL, errors.RuntimeFailed, Code.INTERNAL),
    ],
)
def test_errno_gives_branch_for_code_and_status_for_co(
    number: int, kind: type[errors.CrustError], code: grpc.StatusCode
) -> None:
    error = syscalls.translate(OSError(number, "x"), "cannot do it")
    assert isinstance(error, kind)
    assert status.code_of(error) is code
    assert errno.errorcode[number] in error.why


def test_translate_keeps_cause_reason_and_path() -> None:
    with (
        pytest.raises(errors.NotFound) as caught,
        syscalls.translating("cannot read it", hint="repair it"),
    ):
        open("/nonexistent/file").close()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert str(caught.value) == (
        "cannot read it: No such file or directory (ENOENT), /nonexistent/file; repair it"
    )


def test_translating_passes_crust_errors_unchanged() -> None:
    original = errors.Conflict("two")
    with pytest.raises(errors.Conflict) as caught, syscalls.translating("cannot"):
        raise original
    assert caught.value is original


def test_boot_id_is_a_constant_uuid() -> None:
    assert syscalls.boot_id() == syscalls.boot_id()
    assert len(syscalls.boot_id().split("-")) == 5


@pytest.mark.parametrize("address", ["PATH", "@crust-test"])
def test_systemd_is_told_of_start_and_that_process_lives(tmp_path: Path, address: str) -> None:
    """At a socket with a path, and at an abstract one."""
    address = address.replace("PATH", str(tmp_path / "notify")).replace("@", f"@{os.getpid()}-")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listens:
        listens.bind(address.replace("@", "\0"))
        unit = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000000"}
        assert systemd.ping_watchdog(unit)
        assert listens.recv(64) == b"WATCHDOG=1"
        assert systemd.ping_watchdog(unit | {"WATCHDOG_PID": str(os.getpid())})
        assert listens.recv(64) == b"WATCHDOG=1"
        assert systemd.report_serving({"NOTIFY_SOCKET": address})
        assert listens.recv(64) == b"READY=1"
    assert systemd.ping_watchdog(unit), "a systemd that does not listen is no error"


def test_nothing_is_sent_outside_of_unit_or_for_another_process(tmp_path: Path) -> None:
    here = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    assert not systemd.report_serving({})
    assert not systemd.ping_watchdog({})
    assert not systemd.ping_watchdog({"WATCHDOG_USEC": "1"})
    assert not systemd.ping_watchdog(here)
    assert not systemd.ping_watchdog(here | {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"})


@contextmanager
def _process(program: str, *words: str, fds: tuple[int, ...] = ()) -> Iterator[int]:
    command = [sys.executable, "-c", f"{program}; print(flush=True); import sys; sys.stdin.read()"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *words], stdin=pipe, stdout=pipe, pass_fds=fds) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@contextmanager
def _few_descriptors() -> Iterator[None]:
    """No descriptor is free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_holder_of_lock_is_found_by_any_path(tmp_path: Path) -> None:
    """As a process of another mount namespace has; one that only has the file open is no holder."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    path = f"{tmp_path}/one/claim.lock"
    Path(path).touch()
    os.link(path, tmp_path / "two" / "claim.lock")
    (tmp_path / "claim.lock").touch()
    opening = "import fcntl, sys; file = open(sys.argv[1])"
    locking = f"{opening}; fcntl.flock(file, fcntl.LOCK_EX)"
    with (
        _process(locking, f"{tmp_path}/two/claim.lock") as holder,
        _process(locking, f"{tmp_path}/claim.lock") as stranger,
        _process(opening, path) as reader,
    ):
        assert open_files.holders(path) == [holder]
        assert [open_files.has_lock(pid, path) for pid in (holder, stranger, reader)] == [
            True, False, False
        ]  # fmt: skip
    assert not open_files.has_lock(holder, path)
    assert open_files.holders(path) == []
    assert open_files.holders(f"{tmp_path}/absent") == []


def test_process_that_cannot_be_looked_at_has_perhaps_the_lock(tmp_path: Path) -> None:
    """No descriptor is free: nobody can say whether the process has it."""
    path = f"{tmp_path}/claim.lock"
    Path(path).touch()
    locking = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX)"
    unseen = pytest.raises(answers.NotSeen, match=r"locks of process .*EMFILE")
    with _process(locking, path) as holder, _few_descriptors(), unseen:
        open_files.has_lock(holder, path)


def test_process_that_is_watched_by_a_pidfd_is_named() -> None:
    with _process("pass") as watched:
        pidfd = os.pidfd_open(watched)
        with _process("pass", fds=(pidfd,)) as watcher:
            assert open_files.watched(watcher) == {watched}
        os.close(pidfd)
    assert open_files.watched(watched) == set()


def test_processes_are_found_by_whole_words_of_their_arguments() -> None:
    id_ = f"sandbox-{os.getpid()}-1"  # another run of the tests has processes too
    with _process("pass", "-id", id_) as process:
        assert list(arguments.having("-id", id_)) == [process]
        assert list(arguments.having("-id", id_[:-1])) == []
        with _few_descriptors(), pytest.raises(answers.NotSeen, match="EMFILE"):
            arguments.has(process, "-id", id_)
        assert list(arguments.having(id_, "-id")) == []
