"""Whether a file exists, and the files that match a pattern: what cannot be seen is an error, and never absent."""

import errno
import fnmatch
import os
import stat
from pathlib import Path

from crust.host import answers
from crust.host.files.durable import AnyPath
from crust.host.process import syscalls


def exists(path: AnyPath) -> bool:
    """Whether `path` exists, with a slash at its end: as a directory, or a link to one. Raises if it is not seen."""
    with syscalls.translating(f"cannot stat {path}"):
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def is_directory(path: str) -> bool:
    """Whether `path` is a directory, or a link to one. Raises `NotSeen`."""
    absent = (errno.ENOENT, errno.ENOTDIR)
    status = answers.seen(answers.ask(path, lambda: os.stat(path), absent=absent))
    return status is not None and stat.S_ISDIR(status.st_mode)


def names(directory: AnyPath) -> list[str]:
    """The names in a directory, sorted; none if it is not there. Raises an error of crust."""
    with syscalls.translating(f"cannot list {directory}"):
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []


def matching(root: AnyPath, pattern: str) -> list[Path]:
    """The paths below `root` that match the pattern part by part ("*/*.json"), sorted; hidden names too.

    A directory that does not exist has none. Raises an error of crust for one that cannot be listed.
    """
    name, _, below = pattern.partition("/")
    with syscalls.translating(f"cannot list {root}"):
        found = fnmatch.filter(syscalls.names_in(os.fspath(root)), name)
    paths = [Path(root, each) for each in sorted(found)]
    return [path for each in paths for path in matching(each, below)] if below else paths
