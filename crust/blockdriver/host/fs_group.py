"""The group of a volume's files (fsGroup), as a kubelet would set it, for volumes that the host mounts.

Every file gets the group and group read-write; a directory also gets set-gid and group execute, so that new files
have the group too. A symbolic link is changed itself and never followed, other filesystems below the volume are left
alone, and each step is by descriptor, so a writer inside the volume cannot redirect it. The root comes last: its
having the group proves that an earlier pass was complete (OnRootMismatch). So a walk may end after any step. The next
one begins again, and keeps nothing of the first: a writer may have changed any file meanwhile. A file that has its
group already costs one look.

How long a walk takes is up to the tenant, who may have been root on the disk: so the walk is given in steps, and the
caller decides after each whether to go on. It holds a bounded part of the tree in memory: no list of names, the
descriptors of the lowest directories, and a bit for each directory that it entered, which it forgets when these are
too many.

In a deep tree only the lowest directories are open. The walk opens the others again on the way back, as "..", and
compares them with their earlier identity: a directory that a writer moved meanwhile must not lead the walk out of the
volume. Then it reads such a directory again up to the name that it followed down. That is exact, because ext4, xfs
and btrfs give the names that stay in a directory in one order.

No filesystem here has two names for a directory. The walk enters a directory once. If it meets one again, a writer
has moved it meanwhile, which set its change time (rename(2)), or the filesystem is damaged. The walk itself sets that
time as well; so after such a meeting it walks again: then it changes nothing, and an old change time is damage.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Generator
from dataclasses import dataclass, field

from crust.core import errors, volumes
from crust.host.process import syscalls

STEP = 64
"""The visits of one step: about 2 ms, if the inodes are in memory."""

_FILE_BITS = 0o660
_DIRECTORY_BITS = 0o2770
_HELD = 32
"""The open directories of one walk, with two descriptors each: for most trees all of their levels, so that a writer
may move any directory."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SECOND_NS = 1_000_000_000
_CLOCK, _TICK_S = 5, 0.02
"""CLOCK_REALTIME_COARSE, which gives files their times, and longer than it stands still."""
_PIECE, _PIECES = 1024, 1 << 17
"""The inode numbers in one piece of `_Entered`, and its most pieces: 45 MB at most, 10 MB for each TiB of an ext4."""


def steps(root: str, change: volumes.GroupChange) -> Generator[bool, None, None]:
    """Give the tree below the mountpoint `root` its group; yields True after each `STEP` visits of a name.

    A caller that ends early closes the generator. Raises `DirectoryDamaged`, `TreeMoved`, and the translated
    `OSError` of a call.
    """
    with syscalls.opened(root, f"cannot change the group of the files in {root}", _OPEN) as fd:
        status = os.fstat(fd)
        has_bits = status.st_mode & _DIRECTORY_BITS == _DIRECTORY_BITS
        has_group = status.st_gid == change.gid and has_bits
        if change.policy is volumes.GroupPolicy.ON_ROOT_MISMATCH and has_group:
            return
        if (yield from _walked(root, fd, change.gid)):
            time.sleep(_TICK_S)
            yield from _walked(root, fd, change.gid)
        _change_directory(fd, status, change.gid)


def _walked(root: str, fd: int, gid: int) -> Generator[bool, None, bool]:
    """Walk once in steps; returns whether a directory was met again."""
    status, space = os.fstat(fd), os.fstatvfs(fd)
    walk = _Walk(root, gid, status.st_dev, space.f_blocks * space.f_frsize)
    with contextlib.closing(walk.visits(fd)) as visits:
        for number, _ in enumerate(visits, 1):
            if number % STEP == 0:
                yield True
    return walk.has_met_again


@dataclass(slots=True)
class _Entered:
    """The directories that a walk has entered, by their inodes."""

    _pieces: dict[int, bytearray] = field(default_factory=dict)
    is_complete: bool = True

    def add(self, inode: int) -> bool:
        """Note a directory; returns False if it was noted before."""
        piece, number = divmod(inode, _PIECE)
        bits = self._pieces.get(piece)
        if bits is None:
            if len(self._pieces) == _PIECES:
                self._pieces.clear()
                self.is_complete = False
            bits = self._pieces[piece] = bytearray(_PIECE // 8)
        place, bit = number >> 3, 1 << (number & 7)
        is_new = not bits[place] & bit
        bits[place] |= bit
        return is_new


class _Level:
    """A directory on the way down; `fd` is -1 while it is closed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        try:
            self.inode = _inode(fd)
            self.names = os.scandir(fd)
        except OSError:
            os.close(fd)
            raise
        self.followed = ""
        """The last name that led down."""
        self.is_passing = False
        """Whether the names up to `followed` come for the second time."""

    def close(self) -> None:
        if self.fd >= 0:
            self.names.close()
            os.close(self.fd)
            self.fd = -1


@dataclass(slots=True)
class _Walk:
    """One walk over the tree of a filesystem of `size_bytes`."""

    _root: str
    _gid: int
    _device: int
    _size_bytes: int
    _began_ns: int = field(default_factory=lambda: time.clock_gettime_ns(_CLOCK))
    _levels: list[_Level] = field(default_factory=list)
    _entered: _Entered = field(default_factory=_Entered)
    has_met_again: bool = False
    """Whether a directory was met again that may have been moved meanwhile."""

    def visits(self, root: int) -> Generator[None, None, None]:
        """Depth first without recursion: a tree may be deeper than Python's stack. Raises as `steps`; `OSError`."""
        try:
            self._mark_entered(os.fstat(root))
            self._go_down(os.dup(root))
            while self._levels:
                level = self._levels[-1]
                entry = next(level.names, None)
                if entry is None:
                    self._leave()
                elif level.is_passing:
                    level.is_passing = entry.name != level.followed
                elif (child := self._visit(level.fd, entry.name)) >= 0:
                    level.followed = entry.name
                    self._go_down(child)
                yield
        finally:
            for level in self._levels:
                level.close()

    def _go_down(self, directory: int) -> None:
        self._levels.append(_Level(directory))
        if len(self._levels) > _HELD:
            self._levels[-_HELD].close()

    def _leave(self) -> None:
        level = self._levels.pop()
        try:
            if level.is_passing:
                raise _moved()
            if not self._levels:
                return  # the root, which the caller changes last
            _change_directory(level.fd, os.fstat(level.fd), self._gid)
            parent = self._levels[-1]
            if parent.fd < 0:
                parent.fd = os.open("..", _OPEN, dir_fd=level.fd)
                parent.names, parent.is_passing = os.scandir(parent.fd), True
                if _inode(parent.fd) != parent.inode:
                    raise _moved()
        finally:
            level.close()

    def _visit(self, parent: int, name: str) -> int:
        """Change a file and return -1, or return a descriptor of a directory."""
        try:
            status = self._look(parent, name)
            if status.st_dev != self._device:
                return -1
            if not stat.S_ISDIR(status.st_mode):
                _change_file(parent, name, status, self._gid)
                return -1
            child, is_entered = os.open(name, _OPEN, dir_fd=parent), False
            try:
                is_entered = self._mark_entered(os.fstat(child))
            finally:
                if not is_entered:
                    os.close(child)
            return child if is_entered else -1
        except FileNotFoundError:
            return -1  # a running writer removed it

    def _look(self, parent: int, name: str) -> os.stat_result:
        try:
            return os.stat(name, dir_fd=parent, follow_symlinks=False)
        except OSError as err:
            if err.errno != errno.ELOOP:
                raise
            inode = os.fstat(parent).st_ino
            raise self._damaged(inode, "a name in it leads to itself or a parent") from err

    def _mark_entered(self, directory: os.stat_result) -> bool:
        """Note that a directory is entered; False for a mount point, or if it was entered before."""
        if directory.st_dev != self._device:
            return False  # mounted over since the look
        if directory.st_size > self._size_bytes:
            why = f"it has {directory.st_size} bytes, and the filesystem {self._size_bytes}"
            raise self._damaged(directory.st_ino, why)
        if self._entered.add(directory.st_ino):
            return True
        latest_ns = directory.st_ctime_ns
        if latest_ns % _SECOND_NS == 0:  # an ext4 with small inodes keeps whole seconds
            latest_ns += _SECOND_NS
        if self._entered.is_complete and latest_ns < self._began_ns:
            raise self._damaged(directory.st_ino, "more than one name leads to it")
        self.has_met_again = True
        return False

    def _damaged(self, inode: int, why: str) -> errors.Corrupt:
        return errors.Corrupt.named(
            "DirectoryDamaged",
            f"the directory with inode {inode} of the filesystem on {self._root} is damaged",
            why=why,
        )


def _moved() -> errors.OperationPending:
    return errors.OperationPending.named(
        "TreeMoved",
        "the group of the volume's files is not set everywhere",
        why=f"a directory more than {_HELD} levels above the present one, or its name, was moved meanwhile",
    )


def _inode(directory: int) -> tuple[int, int]:
    status = os.fstat(directory)
    return status.st_dev, status.st_ino


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
