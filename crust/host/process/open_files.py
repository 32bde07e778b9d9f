"""The holders of a lock on a file, and copies of another process's descriptors: pidfd_getfd(2).

`has_lock` decides: a process that cannot be looked at is not seen. `holders` names the processes that it can see, for
messages and for proofs that need a holder; it never proves that there is none.

A copy shares the open file description, and with it an OFD lock or an exclusive open, which opening the file again
would not. It needs the right to trace the process: root, with CAP_SYS_PTRACE where the process is in another user
namespace, and not where kernel.yama.ptrace_scope is 3.
"""

import contextlib
import os
from collections.abc import Generator, Iterator
from functools import partial

from crust.host import answers
from crust.host.process import hidden, processes, syscalls

_NEEDS = "CAP_SYS_PTRACE, and a /proc of its own PID namespace"


def copies(pid: int, path: str) -> Generator[int, None, None]:
    """A copy of each descriptor that the process has of the file; the caller closes them.

    No copy if the process has ended. Raises `errors.Refused` if it may not be traced, and `answers.NotSeen`.
    """
    file = os.lstat(path)
    process = answers.seen(processes.of(pid))
    if process is None:
        return
    with (
        contextlib.suppress(ProcessLookupError, FileNotFoundError),
        processes.holding(process) as pidfd,
    ):
        if pidfd is None:
            return
        for number in _of(str(pid), path, file):
            with syscalls.translating(f"cannot copy a descriptor of process {pid}"):
                yield syscalls.copy_descriptor(pidfd, number)


def has_lock(pid: int, path: str) -> bool:
    """Whether the process has a lock on the file: it took it, or it inherited it. False if either does not exist.

    Raises `answers.NotSeen`.
    """
    return answers.seen(_lock(pid, path)) is True


def holders(path: str | os.PathLike[str]) -> list[int]:
    """The processes that have a lock on the file, as far as this process may look. Empty if there is no such file.

    A process that inherited the lock has it like the process that took it.
    """
    return [pid for pid in _pids() if _lock(pid, path) == answers.Present(value=True)]


def having_socket(number: int) -> list[int]:
    """The processes that have the socket of this inode open, as far as this process may look: for messages alone."""

    def has(pid: int) -> bool:
        directory = f"/proc/{pid}/fd"
        for fd in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                if os.readlink(f"{directory}/{fd}") == f"socket:[{number}]":
                    return True
        return False

    found = []
    for pid in _pids():
        answer = answers.ask(f"the sockets of process {pid}", partial(has, pid), needs=_NEEDS)
        if answer == answers.Present(value=True):
            found.append(pid)
    return found


def _pids() -> list[int]:
    """The processes; none if they are not seen."""
    match answers.ask("the processes", lambda: os.listdir("/proc")):
        case answers.Present(names):
            return [int(name) for name in names if name.isdigit()]
        case _:
            return []


def watched(pid: int) -> set[int]:
    """The processes that a process watches by pidfds (proc_pid_fdinfo(5)). Raises `answers.NotSeen`."""
    directory = f"/proc/{pid}/fdinfo"

    def look() -> set[int]:
        targets = set()
        for fd in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                lines = syscalls.read_whole(f"{directory}/{fd}").splitlines()
                targets |= {int(line.split()[1]) for line in lines if line.startswith(b"Pid:")}
        return targets

    answer = answers.ask(f"what process {pid} watches", look, absent=hidden.ENDED, needs=_NEEDS)
    return answers.seen(answer) or set()


def _lock(pid: int, path: str | os.PathLike[str]) -> answers.Answer[bool]:
    """Whether one of the process's descriptors of the file has a lock (proc_pid_fdinfo(5))."""

    def look() -> bool:
        for fd in _of(str(pid), path, os.stat(path)):
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                if b"\nlock:" in syscalls.read_whole(f"/proc/{pid}/fdinfo/{fd}"):
                    return True
        return False

    return answers.ask(f"the locks of process {pid}", look, absent=hidden.ENDED, needs=_NEEDS)


def _of(pid: str, path: str | os.PathLike[str], file: os.stat_result) -> Iterator[int]:
    """The descriptors that a process has of the file.

    A look at an open file may hang, so it looks only at files of the same name: in another mount namespace the path
    has another beginning.
    """
    directory, name = f"/proc/{pid}/fd", os.path.basename(os.fspath(path))
    for fd in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            opened = f"{directory}/{fd}"
            is_named = os.path.basename(os.readlink(opened)) == name
            if is_named and os.path.samestat(os.stat(opened), file):
                yield int(fd)
