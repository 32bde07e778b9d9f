"""The users of a mount, for the error message after the kernel has refused to unmount it.

What the search does not see stays unnamed, and the refusal stays. A process's open file may be on a file server that
hangs, so the search uses only the kernel's own data. It reads /proc of every process, which takes milliseconds.
"""

import contextlib
import errno
import os
from collections.abc import Iterator

from crust.host import answers
from crust.host.block import loopctl, users
from crust.host.block.holders import DeviceInUse, Holder
from crust.host.mounts import mountinfo
from crust.host.process import arguments, syscalls

_NOT_SHOWN = (*syscalls.ABSENT, errno.EACCES, errno.EPERM)
"""The process has ended, or the kernel does not show its files: it stays unnamed."""


def in_use(target: str) -> DeviceInUse:
    """The error for a busy mount, with the mounts and loop devices on it and the processes that use it. Blocks."""
    mounts = tuple(mount.target for mount in mountinfo.below(target))
    match answers.ask(f"the users of {target}", lambda: (loops_of(target), of(target))):
        case answers.Present((loops, holders)):
            return DeviceInUse(target, mounts, loops, holders)
        case answers.Unseen(error):
            return DeviceInUse(target, mounts, unseen=error)
        case answers.Absent():
            return DeviceInUse(target, mounts)


def of(target: str) -> tuple[Holder, ...]:
    """The processes that use files of the mount at `target`, as far as they can be seen. Raises `OSError`."""
    mount = mountinfo.at(target)
    if mount is None:
        return ()
    holders: set[Holder] = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            for by in _uses(pid, mount):
                holders.add(Holder(int(pid), arguments.command_of(int(pid)), by))
        except OSError as err:
            if err.errno not in _NOT_SHOWN:
                raise
    return tuple(sorted(holders))


def _uses(pid: str, mount: mountinfo.Mount) -> Iterator[str]:
    """How a process uses files of the mount. Raises `OSError` when it has ended."""
    below = f"{mount.target}/"
    for name in ("cwd", "root", "exe"):
        if _link(f"/proc/{pid}/{name}").startswith((below, f"{mount.target}\0")):
            yield name
    if f" {below}".encode() in syscalls.read_whole(f"/proc/{pid}/maps"):
        yield "map"
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = _link(f"/proc/{pid}/fd/{fd}")
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            is_file = path[0] == "/" and path != "/dev/null\0"
            if is_file and mountinfo.mount_id_of(pid, fd) == mount.mount_id:
                yield f"fd {fd}"


def _link(path: str) -> str:
    """Where a link of procfs leads, with a NUL after it; a kernel thread has none, and a descriptor may be closed."""
    try:
        return f"{os.readlink(path)}\0"
    except FileNotFoundError:
        return "\0"


def loops_of(target: str) -> tuple[str, ...]:
    """The loop devices of files in a mount, or upon the device whose node is bound there. Raises `OSError`."""
    if syscalls.block_device_at(target) is not None:
        return users.in_use(target).loops
    below = (number for number, file in loopctl.attached() if file.startswith(f"{target}/"))
    return tuple(f"/dev/loop{number}" for number in below)
