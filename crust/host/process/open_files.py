"""What another process has open, and a copy of it: pidfd_getfd(2).

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


def _of(pid: int, file: os.stat_result) -> list[int]:
    directory = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.path.samestat(os.stat(f"{directory}/{name}"), file):
                found.append(int(name))
    return found
