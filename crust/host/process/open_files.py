"""What other processes have open, and a copy of it: pidfd_getfd(2).

A copy shares the open file description, and with it an OFD lock or an exclusive open, which opening the file again
would not. It needs the right to trace the process: root, with CAP_SYS_PTRACE where the process is in another user
namespace, and not where kernel.yama.ptrace_scope is 3.
"""

import contextlib
import os
from collections.abc import Generator

from crust.host.process import oserrors, syscalls


def copies(pid: int, file: os.stat_result) -> Generator[int, None, None]:
    """A copy of each descriptor that the process has of `file`; the caller closes them.

    None if the process has ended. Raises `errors.Refused` if it may not be traced.
    """
    with (
        contextlib.suppress(ProcessLookupError, FileNotFoundError),
        syscalls.closing(os.pidfd_open(pid)) as process,
    ):
        for number in _of(pid, file):
            with oserrors.translating(f"cannot copy a descriptor of process {pid}"):
                yield syscalls.copy_descriptor(process, number)


def holders(path: str) -> list[int]:
    """The processes that have the file open, as far as this one may look; none if there is no such file.

    A look at an open file may hang, so only those of the same name are looked at: in another mount namespace the
    path has another beginning.
    """
    found, name = [], os.path.basename(path)
    with contextlib.suppress(OSError):
        wanted = os.stat(path)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                opened = (f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd"))
                if any(_is(each, name, wanted) for each in opened):
                    found.append(int(pid))
    return found


def watched(pid: int) -> set[int]:
    """The processes that a process watches by pidfds (proc_pid_fdinfo(5))."""
    directory, found = f"/proc/{pid}/fdinfo", set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(directory):
            with contextlib.suppress(OSError), open(f"{directory}/{fd}", encoding="ascii") as file:
                found |= {int(line.split()[1]) for line in file if line.startswith("Pid:")}
    return found


def _is(descriptor: str, name: str, wanted: os.stat_result) -> bool:
    with contextlib.suppress(OSError):  # it was closed meanwhile
        is_named = os.path.basename(os.readlink(descriptor)) == name
        return is_named and os.path.samestat(os.stat(descriptor), wanted)
    return False


def _of(pid: int, file: os.stat_result) -> list[int]:
    directory = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.path.samestat(os.stat(f"{directory}/{name}"), file):
                found.append(int(name))
    return found
