"""The group of a volume's files (fsGroup), as a kubelet would set it, for volumes that the host mounts.

Every file gets the group and group read-write; a directory also gets set-gid and group execute, so that new files
have the group too. A symbolic link is changed itself and never followed, other filesystems below the volume are left
alone, and each step is by descriptor, so a writer inside the volume cannot redirect it. The root comes last: its
having the group proves that an earlier pass was complete (OnRootMismatch).
"""

import os
import stat

from crust import volumes
from crust.host.process import oserrors

_FILE_BITS = 0o660
_DIRECTORY_BITS = 0o2770
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def apply(root: str, change: volumes.GroupChange) -> None:
    """Give the tree below the mountpoint `root` its group. It visits every file."""
    with oserrors.translating(f"cannot change the group of the files in {root}"):
        fd = os.open(root, _OPEN)
        try:
            status = os.fstat(fd)
            if change.policy is volumes.GroupPolicy.ON_ROOT_MISMATCH and _matches(
                status, change.gid
            ):
                return
            _walk(fd, status.st_dev, change.gid)
            _change_directory(fd, status, change.gid)
        finally:
            os.close(fd)


def _matches(status: os.stat_result, gid: int) -> bool:
    mode = stat.S_IMODE(status.st_mode)
    return status.st_gid == gid and mode & _DIRECTORY_BITS == _DIRECTORY_BITS


def _walk(root: int, device: int, gid: int) -> None:
    """Depth first without recursion: a tree may be deeper than Python's stack. Raises `OSError`."""
    stack = [(os.dup(root), os.listdir(root))]
    try:
        while stack:
            directory, names = stack[-1]
            if not names:
                _leave(stack, gid, is_root=len(stack) == 1)
                continue
            name = names.pop()
            if (child := _visit(directory, name, device, gid)) >= 0:
                stack.append((child, os.listdir(child)))
    finally:
        for directory, _ in stack:
            os.close(directory)


def _leave(stack: list[tuple[int, list[str]]], gid: int, *, is_root: bool) -> None:
    directory, _ = stack.pop()
    try:
        if not is_root:
            _change_directory(directory, os.fstat(directory), gid)
    finally:
        os.close(directory)


def _visit(parent: int, name: str, device: int, gid: int) -> int:
    """Change an entry that is not a directory and return -1; return a descriptor of one that is."""
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
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        now = os.fstat(fd)
        if not stat.S_ISREG(now.st_mode):
            return
        path = f"/proc/self/fd/{fd}"
        if now.st_gid != gid:
            os.chown(path, -1, gid)
        wanted = stat.S_IMODE(now.st_mode) | _FILE_BITS
        if stat.S_IMODE(os.fstat(fd).st_mode) != wanted:
            os.chmod(path, wanted)
    finally:
        os.close(fd)


def _change_directory(fd: int, status: os.stat_result, gid: int) -> None:
    if status.st_gid != gid:
        os.fchown(fd, -1, gid)
    wanted = stat.S_IMODE(status.st_mode) | _DIRECTORY_BITS
    if stat.S_IMODE(status.st_mode) != wanted:
        os.fchmod(fd, wanted)
