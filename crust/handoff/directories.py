"""The directories of the handoff: the root and the entries belong to root or this user, and nobody else writes them.

The rule (H-4): any other directory, and a symbolic link in its place, is reported, and neither used nor deleted. So a
lock is taken, and a claim put aside, only in a directory that was checked.
"""

import os
import stat

from crust.core import errors
from crust.host.process import syscalls


class UntrustedDirectory(errors.Refused):
    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} is not trusted", why=why)


def exists(path: str) -> bool:
    """Whether it exists. Raises `UntrustedDirectory` unless it is a directory that only root or this user writes."""
    with syscalls.translating(f"cannot look at {path}"):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
    if not stat.S_ISDIR(status.st_mode):
        raise UntrustedDirectory(path, "it is not a directory")
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedDirectory(path, f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedDirectory(
            path, f"others may write it, mode {stat.S_IMODE(status.st_mode):04o}"
        )
    return True
