"""The processes that the kernel may hide from this one while a look at all processes still counts as whole.

The node's init is one: it is no user of a volume, and a kernel may hide its files even from root. The others are in
control groups that an operator has excepted by name, because a security module hides them and they use no volume. An
exception counts only where the kernel refuses to show a process; what it shows, counts. A question about one process
(has this machine the device open, can the peer be seen) has no exception.

A group is a path as /proc/<pid>/cgroup shows it to this process (cgroups(7)), of the unified hierarchy or of
systemd's own; the groups below it are excepted too.
"""

import errno
from collections.abc import Iterable

from crust.core import errors
from crust.host import answers
from crust.host.process import syscalls

INIT = "1"
"""A mount in its namespace holds its device as every mount does."""
HIDDEN = (errno.EACCES, errno.EPERM)
"""The kernel does not show a process to this one."""
ENDED = (errno.ENOENT, errno.ESRCH)

_HIERARCHIES = (b"0::", b"name=systemd:")
_excepted: tuple[str, ...] = ()
"""Of this process: the kernel's list of processes is one for it, and so are the exceptions of a look at them."""


def except_groups(groups: Iterable[str]) -> None:
    """Set the excepted control groups of this process, once, before it asks."""
    global _excepted
    _excepted = tuple(groups)


def exception() -> errors.NotReady | None:
    """The exceptions of this process; None without any."""
    if not _excepted:
        return None
    return errors.NotReady.named(
        "ControlGroupsExcepted",
        "processes that the kernel hides are not looked at",
        why=f"excepted_groups excepts those of {', '.join(_excepted)}",
    )


def may_hide(pid: str) -> bool:
    """Whether a look at all processes may pass over this process, if the kernel hides it. Raises `NotSeen`."""
    if pid == INIT:
        return True
    if not _excepted:
        return False
    group = group_of(pid)
    return not group or any(f"{group}/".startswith(f"{name.rstrip('/')}/") for name in _excepted)


def group_of(pid: str) -> str:
    """The process's control group, of the first hierarchy that has groups; "" if it has ended. Raises `NotSeen`."""
    path = f"/proc/{pid}/cgroup"
    answer = answers.ask(path, lambda: syscalls.read_whole(path), absent=ENDED)
    lines = (answers.seen(answer) or b"").splitlines()
    groups = [
        line.partition(hierarchy)[2].decode(errors="surrogateescape")
        for hierarchy in _HIERARCHIES
        for line in lines
        if hierarchy in line
    ]
    return next((group for group in groups if group != "/"), "/" if groups else "")
