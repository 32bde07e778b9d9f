"""Is this still that process: a pid and its start, because a pid alone may have passed to another process.

The start is field 22 of /proc/<pid>/stat (proc_pid_stat(5)), in clock ticks since the boot: two processes of one boot
with the same pid differ in it. Records of it live in /run, which ends with the boot.

The rule: only ESRCH of pidfd_open(2), or a pidfd that says so, is the end of a process. A /proc that shows no process
(hidepid), no free descriptor, a seccomp filter: not seen. A process that is not reaped yet has ended.
"""

import contextlib
import errno
import os
import select
from collections.abc import Iterator
from dataclasses import dataclass

from crust.host import answers
from crust.host.process import syscalls

_NEEDS = "pidfd_open(2), and a /proc of its own PID namespace that shows all processes"
_STARTED = 19
"""The place of field 22 in what `_stat` gives."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of this boot, by its number in this PID namespace."""

    pid: int
    started: int
    """Clock ticks since the boot."""


def of(pid: int) -> answers.Answer[Process]:
    """The process that has this pid now; absent if none has, or it has ended and is not reaped."""

    def process() -> Process:
        with syscalls.closing(os.pidfd_open(pid)) as pidfd:
            return Process(pid, int(_stat(pid, pidfd)[_STARTED]))

    return answers.ask(f"process {pid}", process, absent=(errno.ESRCH,), needs=_NEEDS)


def hold(process: Process) -> answers.Answer[int]:
    """A pidfd of exactly this process, which the caller closes; absent if it has ended."""
    return answers.ask(
        f"process {process.pid}", lambda: _pidfd(process), absent=(errno.ESRCH,), needs=_NEEDS
    )


@contextlib.contextmanager
def holding(process: Process) -> Iterator[int | None]:
    """The pidfd as `hold` gives it, closed after the block; None if the process has ended. Raises `NotSeen`."""
    pidfd = answers.seen(hold(process))
    try:
        yield pidfd
    finally:
        if pidfd is not None:
            os.close(pidfd)


def lives(process: Process) -> answers.Answer[Process]:
    """The process, if it runs; absent if it has ended."""
    match hold(process):
        case answers.Present(pidfd):
            os.close(pidfd)
            return answers.Present(process)
        case other:
            return other


def state(process: Process) -> answers.Answer[str]:
    """The letter of proc_pid_stat(5), "T" of a process that SIGSTOP has stopped; absent if it has ended."""

    def look() -> str:
        with syscalls.closing(_pidfd(process)) as pidfd:
            return _stat(process.pid, pidfd)[0].decode()

    return answers.ask(f"process {process.pid}", look, absent=(errno.ESRCH,), needs=_NEEDS)


def has_ended(process: Process) -> bool:
    """Whether the process was seen to have ended. Raises `NotSeen`."""
    return answers.seen(lives(process)) is None


def is_over(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


def _pidfd(process: Process) -> int:
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as err:
        if err.errno in (errno.EINVAL, errno.ENOENT):
            _check_leads(process)
        raise
    try:
        if int(_stat(process.pid, pidfd)[_STARTED]) != process.started:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


def _stat(pid: int, pidfd: int) -> list[bytes]:
    """/proc/<pid>/stat from its field 3 on, of the process of the pidfd, which has this pid as long as it runs."""
    try:
        text = syscalls.read_whole(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError) as err:
        if not is_over(pidfd):  # it runs, and /proc shows it to others
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), err.filename) from err
        text = b""
    if is_over(pidfd):  # then /proc may have shown a later process
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return text.rpartition(b")")[2].split()


def _check_leads(process: Process) -> None:
    """After EINVAL or, of later kernels, ENOENT: raise ESRCH unless the number is that of a process.

    It stays the number of a session or of a process group whose leader has ended, and a thread may have it.
    """
    try:
        os.kill(process.pid, 0)
    except OSError as err:
        if err.errno != errno.EPERM:  # that is: it is there, and another user's (kill(2))
            raise
    status = syscalls.read_whole(f"/proc/{process.pid}/status")
    leader = next(line.split()[1] for line in status.splitlines() if line.startswith(b"Tgid:"))
    if int(leader) != process.pid:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
