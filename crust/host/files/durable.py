"""Atomic, durable file writes: a crash leaves the old content or the new, never a part.

Each write creates a temporary file under a dot name in the same directory, fsyncs it, renames it over the target and
fsyncs the directory. A crash leaves at worst a temporary file, which `remove_temporary_files` removes. Every function
is one thread hop for its caller: spread over awaits, a cancellation could fall between write and rename.

A read refuses what another user could have written: a symbolic link, a pipe or device, a file that another user owns
or may write.
"""

import contextlib
import errno
import logging
import os
import secrets
import stat

from crust.core import errors
from crust.host.process import oserrors, syscalls

_log = logging.getLogger(__name__)

_TEMPORARY_SUFFIX = ".crust-tmp"


class PathAlreadyExists(errors.Conflict):
    """A path that is to be created exists already."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} exists already", hint="find out what made it")


class UntrustedFile(errors.Refused):
    """A file that another user could have written."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} is not trusted",
            why=why,
            hint=f"if you made it: chown root {path}; chmod go-w {path}. It may hold what live guests use: do not "
            "remove it",
        )


class UnreadableFile(errors.Corrupt):
    """A file that crust cannot have written like this."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} cannot be read as a file of crust", why=why, hint="look at it by hand"
        )


def publish(
    path: str | os.PathLike[str],
    data: bytes,
    *,
    mode: int = 0o600,
    survives_power_cut: bool = True,
    replaces: bool = True,
) -> None:
    """Make `path` hold exactly `data`, in place of whatever was there, atomically and durably.

    Without `replaces` it must be absent; raises `PathAlreadyExists`. Without `survives_power_cut` nothing is synced:
    for state that a reboot makes invalid anyway. Every process of this boot still sees the old content or the new.
    """
    final = os.fspath(path)
    aside = temporary_name(final)
    with oserrors.translating(f"cannot write {path}"):
        try:
            write_staged(aside, data, mode=mode, sync=survives_power_cut, shown=str(path))
            # link(2) never replaces
            (os.rename if replaces else os.link)(aside, final)
        except FileExistsError as err:
            raise PathAlreadyExists(str(path)) from err
        finally:
            with contextlib.suppress(FileNotFoundError):  # a rename has taken it away
                os.unlink(aside)
        if survives_power_cut:
            _sync(os.path.dirname(final) or ".")


def read(path: str | os.PathLike[str], *, limit_bytes: int) -> bytes:
    """`find` for a file that must be there; raises `NotFound`."""
    data = find(path, limit_bytes=limit_bytes)
    if data is None:
        raise oserrors.translate(
            OSError(errno.ENOENT, os.strerror(errno.ENOENT)), f"cannot read {path}"
        )
    return data


def find(path: str | os.PathLike[str], *, limit_bytes: int) -> bytes | None:
    """The content of a regular file of at most `limit_bytes` that only root or this user can have written.

    None if it is absent; never if it is there: a disk that is offline gives ENODEV, a socket ENXIO. Raises
    `UntrustedFile`, `UnreadableFile`.
    """
    with oserrors.translating(f"cannot read {path}"):
        try:
            # O_NONBLOCK: opening a pipe that another user put there must not hang.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as err:
            if err.errno in (errno.ENODEV, errno.ENXIO):
                raise UnreadableFile(str(path), oserrors.reason(err)) from err
            raise
        with syscalls.closing(fd):  # not open(fd): it refuses a directory without our reason
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


def remove(path: str | os.PathLike[str], *, survives_power_cut: bool = True) -> None:
    """Remove a file durably; absent is a success."""
    with oserrors.translating(f"cannot remove {path}"):
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        if survives_power_cut:
            _sync(os.path.dirname(path) or ".")


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable (fsync(2) of a file says nothing about its name)."""
    with oserrors.translating(f"cannot sync {path}"):
        _sync(os.fspath(path))


def make_directory(path: str | os.PathLike[str], mode: int) -> None:
    """Make one directory, durably, with exactly `mode` whatever the umask; one that is there is kept, and synced.

    The parent must exist. Raises `UntrustedFile` when a file is there, or a directory that another user could write.
    """
    with oserrors.translating(f"cannot make the directory {path}"):
        try:
            make_staging(path, mode)
        except PathAlreadyExists:
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode):
                raise UntrustedFile(str(path), "it is not a directory") from None
            _check_only_ours(str(path), status)
            # Names that a killed process gave are not known to be durable, and are about to be relied on.
            _sync(os.fspath(path))
        _sync(os.path.dirname(path) or ".")


def make_directories(path: str | os.PathLike[str], mode: int) -> None:
    """`make_directory`, and before it the parents that do not exist."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_directories(parent, mode)
    make_directory(path, mode)


def make_staging(path: str | os.PathLike[str], mode: int) -> None:
    """Make a directory to be filled for `publish_directory`, with exactly `mode`; `PathAlreadyExists` if it is there.

    Not durable: nothing depends on it until it is published.
    """
    with oserrors.translating(f"cannot make the directory {path}"):
        try:
            os.mkdir(path, mode)
        except FileExistsError as err:
            raise PathAlreadyExists(str(path)) from err
        # only if the umask changed it: a chmod is an event for those who watch the directory
        if stat.S_IMODE(os.lstat(path).st_mode) != mode:
            os.chmod(path, mode)


def write_staged(
    path: str | os.PathLike[str],
    data: bytes,
    *,
    mode: int = 0o600,
    sync: bool = True,
    shown: str = "",
) -> None:
    """Write a new file, its content synced, into a directory of `make_staging`, or aside; `shown` is its name then.

    It needs no rename of its own, nor a sync of its name: `publish_directory` makes both visible and durable at once.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        oserrors.translating(f"cannot write {shown or path}"),
        syscalls.closing(os.open(path, flags, 0o600)) as fd,
    ):
        os.fchmod(fd, mode)  # the umask must not decide
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        if sync:
            os.fsync(fd)


def publish_directory(staging: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Rename a filled staging directory to its final name, durably; raises `PathAlreadyExists`.

    Both must be on one filesystem. An empty directory at `final` is replaced (rename(2)).
    """
    staging, final = os.fspath(staging), os.fspath(final)
    with oserrors.translating(f"cannot publish the directory {final}"):
        _sync(staging)
        try:
            os.rename(staging, final)
        except OSError as err:
            if isinstance(err, (FileExistsError, NotADirectoryError)) or os.path.lexists(final):
                raise PathAlreadyExists(final) from err
            raise
        _sync(os.path.dirname(final) or ".")


def temporary_name(path: str | os.PathLike[str]) -> str:
    """A name beside `path` for a file that is to be renamed; what a crash leaves of it is removed."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name[:200]}.{secrets.token_hex(6)}{_TEMPORARY_SUFFIX}")


def remove_temporary_files(directory: str | os.PathLike[str]) -> None:
    """Remove the temporary files that a crash left in a directory.

    Only the directory's one writer may call it, while it writes nothing: a file in progress looks the same.
    One that cannot be removed, a damaged one for example, stays: nothing ever reads it.
    """
    with oserrors.translating(f"cannot remove temporary files from {directory}"):
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
