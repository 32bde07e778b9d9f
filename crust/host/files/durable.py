"""Files of crust's own: written whole or not at all, and on the disk that was opened.

Each write creates a temporary file under a dot name in the same directory, fsyncs it, renames it over the target and
fsyncs the directory. A crash leaves the old content or the new, and at worst a temporary file, which
`remove_temporary_files` removes. Every function is one thread hop for its caller: spread over awaits, a cancellation
could fall between write and rename.

A read refuses a file that another user could have written: a symbolic link, a pipe or device, a file that another
user owns or may write.

Each system call looks a path up again: when a disk is unmounted, or another one is mounted over a directory, the next
call writes to another filesystem. So a `HeldDirectory` has a descriptor, which stays with the directory that was
opened. A `HeldPath` below it serves as a path in any system call of this process, by way of /proc/self/fd, and prints
as the path that people know. From the descriptor on the kernel looks a path up as usual, and would enter a mount over
a folder: so a folder with important files is held too (`hold_folder`).
"""

import contextlib
import errno
import logging
import os
import pathlib
import secrets
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from crust.core import errors
from crust.host.process import syscalls

_log = logging.getLogger(__name__)

AnyPath: TypeAlias = str | os.PathLike[str]

_TEMPORARY_SUFFIX = ".crust-tmp"


class PathAlreadyExists(errors.Conflict):
    def __init__(self, path: str) -> None:
        super().__init__(f"{path} exists already")


class UntrustedFile(errors.Refused):
    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} is not trusted",
            why=why,
            hint=f"if you made it: chown root {path}; chmod go-w {path}. It may hold what live guests use: do not "
            "remove it",
        )


class UnreadableFile(errors.Corrupt):
    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} cannot be read as a file of crust", why=why)


def write_file(
    path: AnyPath,
    data: bytes,
    *,
    mode: int = 0o600,
    survives_power_cut: bool = True,
    replaces: bool = True,
) -> None:
    """Make `path` hold exactly `data`, in place of any earlier content, atomically and durably.

    Without `replaces` it must be absent; raises `PathAlreadyExists`. Without `survives_power_cut` nothing is synced:
    for state that a reboot makes invalid anyway. Every process of this boot still sees the old content or the new.
    """
    final = os.fspath(path)
    aside = temporary_name(final)
    with syscalls.translating(f"cannot write {path}"):
        try:
            write_staged(aside, data, mode=mode, sync=survives_power_cut, shown=str(path))
            if replaces:
                os.rename(aside, final)
                aside = ""
            else:
                os.link(aside, final)  # it never replaces
        except FileExistsError as err:
            raise PathAlreadyExists(str(path)) from err
        finally:
            if aside:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside)
        if survives_power_cut:
            _sync(os.path.dirname(final) or ".")


def shorten(path: AnyPath, data: bytes) -> bool:
    """Write text in place of a longer one, whose rest becomes spaces: a full filesystem takes it. Not synced.

    False if the file is absent or shorter. Only a file of more than a page can hold a mixture after a kill.
    """
    with syscalls.translating(f"cannot write {path}"), opened(path, os.O_RDWR) as fd:
        length = 0 if fd is None else os.fstat(fd).st_size
        if fd is None or length < len(data):
            return False
        return os.pwrite(fd, data.ljust(length), 0) == length


def read(path: AnyPath, *, limit_bytes: int) -> bytes:
    """`find` for a file that must be there; raises `NotFound`."""
    data = find(path, limit_bytes=limit_bytes)
    if data is None:
        absent = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        raise syscalls.translate(absent, f"cannot read {path}")
    return data


def find(path: AnyPath, *, limit_bytes: int) -> bytes | None:
    """The content of a regular file of at most `limit_bytes` that only root or this user can have written.

    None if it is absent; never if it is there: a disk that is offline gives ENODEV, a socket ENXIO. Raises
    `UntrustedFile`, `UnreadableFile`.
    """
    with opened(path, os.O_RDONLY) as fd:
        return None if fd is None else content(fd, path, limit_bytes=limit_bytes)


@contextlib.contextmanager
def opened(path: AnyPath, access: int) -> Iterator[int | None]:
    """The descriptor of a file for `content`; None if it is absent. Raises `UntrustedFile`, `UnreadableFile`."""
    with syscalls.translating(f"cannot open {path}"):
        try:
            # O_NONBLOCK: opening a pipe that another user put there must not hang.
            fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = -1
        except OSError as err:
            if err.errno in (errno.ENODEV, errno.ENXIO):
                raise UnreadableFile(str(path), syscalls.reason(err)) from err
            if err.errno == errno.ELOOP:
                raise UntrustedFile(str(path), syscalls.reason(err)) from err
            raise
    if fd < 0:
        yield None
        return
    with syscalls.closing(fd):
        yield fd


def content(fd: int, path: AnyPath, *, limit_bytes: int) -> bytes:
    """The content of an open file, as `find`. Raises `UntrustedFile`, `UnreadableFile`."""
    with syscalls.translating(f"cannot read {path}"):
        # not open(fd): it refuses a directory without our reason
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableFile(str(path), "it is not a regular file")
        _check_only_ours(str(path), status)
        data = os.read(fd, min(status.st_size, limit_bytes) + 1)
        while len(data) <= limit_bytes and (part := os.read(fd, limit_bytes + 1 - len(data))):
            data += part
    if len(data) > limit_bytes:
        raise UnreadableFile(str(path), f"it is larger than {limit_bytes} bytes")
    return data


def remove(path: AnyPath, *, survives_power_cut: bool = True) -> None:
    """Remove a file durably; absent is a success."""
    with syscalls.translating(f"cannot remove {path}"):
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        if survives_power_cut:
            _sync(os.path.dirname(path) or ".")


def sync_directory(path: AnyPath) -> None:
    """Make the names in a directory durable (fsync(2) of a file says nothing about its name)."""
    with syscalls.translating(f"cannot sync {path}"):
        _sync(os.fspath(path))


def make_directory(path: AnyPath, mode: int) -> None:
    """Make one directory, durably, with exactly `mode` whatever the umask; keep and sync an existing one.

    The parent must exist. Raises `UntrustedFile` when a file is there, or a directory that another user could write.
    """
    with syscalls.translating(f"cannot make the directory {path}"):
        try:
            make_staging(path, mode)
        except PathAlreadyExists:
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode):
                raise UntrustedFile(str(path), "it is not a directory") from None
            _check_only_ours(str(path), status)
            # A killed process may not have synced the names that it gave.
            _sync(os.fspath(path))
        _sync(os.path.dirname(path) or ".")


def make_directories(path: AnyPath, mode: int) -> None:
    """`make_directory`, and before it the parents that do not exist."""
    try:
        make_directory(path, mode)
    except errors.NotFound:
        make_directories(os.path.dirname(path), mode)
        make_directory(path, mode)


def make_staging(path: AnyPath, mode: int) -> None:
    """Make a directory to be filled for `publish_directory`, with exactly `mode`; `PathAlreadyExists` if it is there.

    Not durable: no code depends on it until it is published.
    """
    with syscalls.translating(f"cannot make the directory {path}"):
        try:
            os.mkdir(path, mode)
        except FileExistsError as err:
            raise PathAlreadyExists(str(path)) from err
        # only if the umask changed it: a chmod is an event for the watchers of the directory
        if stat.S_IMODE(os.lstat(path).st_mode) != mode:
            os.chmod(path, mode)


def write_staged(
    path: AnyPath, data: bytes, *, mode: int = 0o600, sync: bool = True, shown: str = ""
) -> None:
    """Write a new file, its content synced, into a directory of `make_staging`, or aside; `shown` is its name then.

    It needs no rename and no sync of its name: `publish_directory` makes file and name visible and durable at once.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with syscalls.opened(path, f"cannot write {shown or path}", flags) as fd:
        os.fchmod(fd, mode)  # the umask must not decide
        unwritten = memoryview(data)
        while unwritten:
            unwritten = unwritten[os.write(fd, unwritten) :]
        if sync:
            os.fsync(fd)


def publish_directory(staging: AnyPath, final: AnyPath) -> None:
    """Rename a filled staging directory to its final name, durably; raises `PathAlreadyExists`.

    Both must be on one filesystem. An empty directory at `final` is replaced (rename(2)).
    """
    staging, final = os.fspath(staging), os.fspath(final)
    with syscalls.translating(f"cannot publish the directory {final}"):
        _sync(staging)
        try:
            os.rename(staging, final)
        except OSError as err:
            if err.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise PathAlreadyExists(final) from err
            raise
        _sync(os.path.dirname(final) or ".")


def temporary_name(path: AnyPath) -> str:
    """A name beside `path` for a file before its rename; `remove_temporary_files` removes it after a crash."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name[:200]}.{secrets.token_hex(6)}{_TEMPORARY_SUFFIX}")


def remove_temporary_files(directory: AnyPath) -> None:
    """Remove the temporary files that a crash left in a directory.

    Only the directory's one writer may call it, while it writes nothing: a file in progress looks the same.
    A file that cannot be removed, for example a damaged one, stays: no code ever reads it.
    """
    with syscalls.translating(f"cannot remove temporary files from {directory}"):
        names = os.listdir(directory)
    for name in names:
        if name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX):
            try:
                os.unlink(os.path.join(directory, name))
            except OSError as err:
                extra = {"directory": str(directory), "file": name, "error": err}
                _log.warning("a temporary file of a crash cannot be removed", extra=extra)


def _sync(directory: str) -> None:
    with syscalls.closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        os.fsync(fd)


def _check_only_ours(path: str, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedFile(path, f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise UntrustedFile(path, f"other users may write it, mode {mode}")


class DirectoryReplaced(errors.PeerUnavailable):
    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is not the directory that was opened",
            why="its disk was unmounted, another one was mounted over it, or it was renamed",
        )
        self.path = path


class HeldDirectory:
    """The directory at `path`, once it is held. It owns the descriptor."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._is_held = False
        self._folders: dict[str, HeldDirectory] = {}

    def hold(self) -> None:
        """Hold the directory now at the path, in place of an earlier one. Raises `NotFound`, `Conflict` (a file)."""
        for folder in self._folders.values():
            folder.let_go()
        with syscalls.translating(f"cannot open {self.path}"):
            self._put(os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self._is_held = True

    def hold_folder(self, name: str) -> None:
        """Hold a folder too: no path into it leads through a mount. Raises `NotFound`, `FolderMountedOver`."""
        folder = self._folders.setdefault(name, HeldDirectory(f"{self.path}/{name}"))
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with syscalls.translating(f"cannot open {folder.path}"):
            fd = os.open(name, flags, dir_fd=self.descriptor())
            if syscalls.mount_at("", directory=fd).is_root:
                os.close(fd)
                raise errors.PeerUnavailable.named(
                    "FolderMountedOver",
                    f"{folder.path} is a mount point",
                    why="its files are below the mount",
                )
            folder._put(fd)
        folder._is_held = True

    def let_go(self) -> None:
        """Release directory and folders, so that the filesystem can be unmounted."""
        for folder in self._folders.values():
            folder.let_go()
        self._is_held = False
        if self._fd >= 0:
            with syscalls.translating("cannot open /dev/null"):
                self._put(os.open("/dev/null", os.O_PATH | os.O_CLOEXEC))

    def check_in_place(self) -> None:
        """Raise `DirectoryReplaced` unless the path leads to the directory that is held, and so for each folder."""
        inside = f"/proc/self/fd/{self.descriptor()}"
        folders = [(each, f"{inside}/{name}") for name, each in self._folders.items()]
        for held, path in ((self, self.path), *folders):
            if held._is_held:
                with syscalls.translating(f"cannot look at {held.path}"):
                    try:
                        present = os.stat(path)
                    except FileNotFoundError as err:
                        raise DirectoryReplaced(held.path) from err
                    if not os.path.samestat(os.stat(held.descriptor()), present):
                        raise DirectoryReplaced(held.path)

    def descriptor(self) -> int:
        """The descriptor. Raises `DirectoryNotHeld`."""
        if not self._is_held:
            raise errors.PeerUnavailable.named(
                "DirectoryNotHeld", f"{self.path} is not open", why="it was not there, or went away"
            )
        return self._fd

    def __truediv__(self, name: str) -> "HeldPath":
        return HeldPath(self, name)

    def _put(self, fd: int) -> None:
        """Have `fd` under the one number that this object ever uses.

        A thread that a hung disk delays may still use a path with that number: it must lead nowhere else.
        """
        if self._fd < 0:
            self._fd = fd
            weakref.finalize(self, os.close, fd)
            return
        try:
            os.dup2(fd, self._fd, inheritable=False)
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class HeldPath(os.PathLike[str]):
    """A name, or several of them, below a held directory."""

    directory: HeldDirectory
    name: str

    def __truediv__(self, name: str) -> "HeldPath":
        return HeldPath(self.directory, f"{self.name}/{name}")

    def __fspath__(self) -> str:
        """For a system call now. Raises `DirectoryNotHeld`."""
        first, _, below = self.name.partition("/")
        folder = self.directory._folders.get(first)
        if folder is not None and folder._is_held:
            return f"/proc/self/fd/{folder._fd}/{below or '.'}"
        return f"/proc/self/fd/{self.directory.descriptor()}/{self.name}"

    def __str__(self) -> str:
        return f"{self.directory.path}/{self.name}"


Place: TypeAlias = pathlib.Path | HeldPath
"""A path that is used with `/`, `os.fspath` and `str`; not "Path", because pathlib's is one of the two."""
