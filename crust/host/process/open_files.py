"""The holders of a lock on a file, and copies of another process's descriptors: pidfd_getfd(2).

`locked` decides: a process that cannot be looked at is not seen. `holders` names the processes that it can see, for
messages and for proofs that need a holder; it never proves that there is none.

A copy shares the open file description, and with it an OFD lock or an exclusive open, which opening the file again
would not. It needs the right to trace the process: root, with CAP_SYS_PTRACE where the process is in another user
namespace, and not where kernel.yama.ptrace_scope is 3.
"""

import os
from collections.abc import Collection, Generator, Iterator
from contextlib import suppress
from functools import partial

from crust.host import answers
from crust.host.process import hidden, processes, syscalls

_NEEDS = "CAP_SYS_PTRACE, and a /proc of its own PID namespace"


def copies(pid: int, paths: Collection[str]) -> Generator[tuple[str, int], None, None]:
    """A copy of each descriptor that the process has of one of these files, with the path; the caller closes them.

    No copy if the process has ended. Raises `errors.Refused` if it may not be traced, and `answers.NotSeen`.
    """
    process = answers.seen(processes.of(pid))
    if process is None:
        return
    with suppress(ProcessLookupError, FileNotFoundError), processes.holding(process) as pidfd:
        if pidfd is None:
            return
        for path, number in _of(pid, paths):
            with syscalls.translating(f"cannot copy a descriptor of process {pid}"):
                yield path, syscalls.copy_descriptor(pidfd, number)


def locked(pid: int, paths: Collection[str]) -> set[str]:
    """Those of the files that the process has a lock on: it took it, or it inherited it. None if it has ended.

    Raises `answers.NotSeen`.
    """
    return answers.seen(_locked(pid, paths)) or set()


def holders(path: str | os.PathLike[str]) -> list[int]:
    """The processes that have a lock on the file, as far as this process may look. Empty if there is no such file.

    A process that inherited the lock has it like the process that took it.
    """
    file = os.fspath(path)
    return [pid for pid in _pids() if _locked(pid, (file,)) == answers.Present({file})]


def having_socket(number: int) -> list[int]:
    """The processes that have the socket of this inode open, as far as this process may look: for messages alone."""

    def has(pid: int) -> bool:
        return any(file == f"socket:[{number}]" for _, file in links(pid))

    found = []
    for pid in _pids():
        answer = answers.ask(f"the sockets of process {pid}", partial(has, pid), needs=_NEEDS)
        if answer == answers.Present(value=True):
            found.append(pid)
    return found


def links(pid: int) -> Iterator[tuple[str, str]]:
    """The open descriptors of a process, each with the text of its link (proc_pid_fd(5)). Raises `OSError`."""
    directory = f"/proc/{pid}/fd"
    for fd in os.listdir(directory):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            yield fd, os.readlink(f"{directory}/{fd}")


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
            with suppress(FileNotFoundError):  # it was closed meanwhile
                lines = syscalls.read_whole(f"{directory}/{fd}").splitlines()
                targets |= {int(line.split()[1]) for line in lines if line.startswith(b"Pid:")}
        return targets

    answer = answers.ask(f"what process {pid} watches", look, absent=hidden.ENDED, needs=_NEEDS)
    return answers.seen(answer) or set()


def _locked(pid: int, paths: Collection[str]) -> answers.Answer[set[str]]:
    """The files of which one of the process's descriptors has a lock (proc_pid_fdinfo(5))."""

    def look() -> set[str]:
        found = set()
        for path, fd in _of(pid, paths):
            with suppress(FileNotFoundError):  # it was closed meanwhile
                if b"\nlock:" in syscalls.read_whole(f"/proc/{pid}/fdinfo/{fd}"):
                    found.add(path)
        return found

    return answers.ask(f"the locks of process {pid}", look, absent=hidden.ENDED, needs=_NEEDS)


def _of(pid: int, paths: Collection[str]) -> Iterator[tuple[str, int]]:
    """The descriptors that a process has of these files, each with the file's path; one list of its descriptors.

    A look at an open file may hang, so it looks only at files of the same names: in another mount namespace a path
    has another beginning.
    """
    names, files = {os.path.basename(path) for path in paths}, dict[tuple[int, int], str]()
    for path in paths:
        with suppress(FileNotFoundError):  # nobody has a lock on it that counts
            status = os.stat(path)
            files[status.st_dev, status.st_ino] = path
    for fd, opened in links(pid):
        if os.path.basename(opened) in names:
            with suppress(FileNotFoundError):  # it was closed meanwhile
                status = os.stat(f"/proc/{pid}/fd/{fd}")
                path_of_it = files.get((status.st_dev, status.st_ino))
                if path_of_it is not None:
                    yield path_of_it, int(fd)
