"""The group of a volume's files (fsGroup), as a kubelet would set it, for volumes that the host mounts.

Every file gets the group and group read-write; a directory also gets set-gid and group execute, so that new files
have the group too. A symbolic link is changed itself and never followed, other filesystems below the volume are left
alone, and each step is by descriptor, so a writer inside the volume cannot redirect it. The root comes last: its
having the group proves that an earlier pass was complete (OnRootMismatch).

In a deep tree only the lowest directories have an open descriptor. The walk opens the others again on the way back,
as "..", and compares them with their earlier identity: a directory that a writer moved meanwhile must not lead the
walk out of the volume.
"""

import os
import stat
from dataclasses import dataclass

from crust.core import errors, volumes
from crust.host.process import syscalls

_FILE_BITS = 0o660
_DIRECTORY_BITS = 0o2770
_HELD = 64
"""The descriptors of one walk: for most trees all of their levels, so that a writer may move any directory."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def apply(root: str, change: volumes.GroupChange) -> None:
    """Give the tree below the mountpoint `root` its group. It visits every file."""
    with (
        syscalls.translating(f"cannot change the group of the files in {root}"),
        syscalls.closing(os.open(root, _OPEN)) as fd,
    ):
        status = os.fstat(fd)
        if change.policy is volumes.GroupPolicy.ON_ROOT_MISMATCH and _matches(status, change.gid):
            return
        _walk(fd, status.st_dev, change.gid)
        _change_directory(fd, status, change.gid)


def _matches(status: os.stat_result, gid: int) -> bool:
    mode = stat.S_IMODE(status.st_mode)
    return status.st_gid == gid and mode & _DIRECTORY_BITS == _DIRECTORY_BITS


@dataclass(slots=True)
class _Level:
    """A directory on the way down; `fd` is -1 while it is closed."""

    fd: int
    inode: tuple[int, int]
    names: list[str]


def _walk(root: int, device: int, gid: int) -> None:
    """Depth first without recursion: a tree may be deeper than Python's stack. Raises `OSError`, `TreeMoved`."""
    levels: list[_Level] = []
    try:
        _go_down(levels, os.dup(root))
        while levels:
            level = levels[-1]
            if not level.names:
                _leave(levels, gid)
            elif (child := _visit(level.fd, level.names.pop(), device, gid)) >= 0:
                _go_down(levels, child)
    finally:
        for level in levels:
            _close(level)


def _go_down(levels: list[_Level], directory: int) -> None:
    level = _Level(directory, _inode(directory), [])
    levels.append(level)
    level.names = os.listdir(directory)
    if len(levels) > _HELD:
        _close(levels[-_HELD])


def _leave(levels: list[_Level], gid: int) -> None:
    level = levels.pop()
    try:
        if not levels:
            return  # the root, which the caller changes last
        _change_directory(level.fd, os.fstat(level.fd), gid)
        if levels[-1].fd < 0:
            _open_again(levels[-1], level.fd)
    finally:
        _close(level)


def _open_again(level: _Level, child: int) -> None:
    """Open a closed directory as the parent of `child`, if it still is the parent."""
    level.fd = os.open("..", _OPEN, dir_fd=child)
    if _inode(level.fd) != level.inode:
        raise errors.OperationPending.named(
            "TreeMoved",
            "the group of the volume's files is not set everywhere",
            why=f"a directory more than {_HELD} levels above the present one was moved meanwhile",
            hint="retry: the next pass begins again",
        )


def _close(level: _Level) -> None:
    if level.fd >= 0:
        os.close(level.fd)
        level.fd = -1


def _inode(directory: int) -> tuple[int, int]:
    status = os.fstat(directory)
    return status.st_dev, status.st_ino


def _visit(parent: int, name: str, device: int, gid: int) -> int:
    """Change a file and return -1, or return a descriptor of a directory."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if status.st_dev != device:
            return -1
        if stat.S_ISDIR(status.st_mode):
            return _enter(parent, name, device)
        _change_file(parent, name, status, gid)
    except FileNotFoundError:
        pass  # a running writer removed it
    return -1


def _enter(parent: int, name: str, device: int) -> int:
    child = os.open(name, _OPEN, dir_fd=parent)
    if os.fstat(child).st_dev == device:
        return child
    os.close(child)  # mounted over since the stat
    return -1


def _change_file(parent: int, name: str, status: os.stat_result, gid: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        if status.st_gid != gid:
            os.chown(name, -1, gid, dir_fd=parent, follow_symlinks=False)
        return
    if status.st_gid == gid and status.st_mode & _FILE_BITS == _FILE_BITS:
        return  # most files of a volume: a kubelet asks for the group at every start of a pod
    # By descriptor: chmod(2) by name follows a link that was put there since the stat. O_PATH, because a plain
    # open would break leases on the file.
    with syscalls.closing(os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)) as fd:
        present = os.fstat(fd)
        if not stat.S_ISREG(present.st_mode):
            return
        path = f"/proc/self/fd/{fd}"
        if present.st_gid != gid:
            os.chown(path, -1, gid)
        mode = stat.S_IMODE(present.st_mode) | _FILE_BITS
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.chmod(path, mode)


def _change_directory(fd: int, status: os.stat_result, gid: int) -> None:
    if status.st_gid != gid:
        os.fchown(fd, -1, gid)
    mode = stat.S_IMODE(status.st_mode) | _DIRECTORY_BITS
    if stat.S_IMODE(status.st_mode) != mode:
        os.fchmod(fd, mode)
