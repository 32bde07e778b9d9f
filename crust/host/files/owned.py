"""How much of a filesystem a file has to itself: its blocks without those that it shares with copies by reference.

st_blocks counts a shared block in every file that has it, so a sum of it promises room that the next write to any of
them takes. FIEMAP tells which extents are shared; a filesystem without it (tmpfs) shares none. What was not placed
yet counts as the file's own. Nothing is flushed for the question.
"""

import errno
import os
from dataclasses import dataclass

from crust.host.files import fiemap
from crust.host.process import oserrors

_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class Owned:
    """The bytes that only one file has, and whether there are others that it shares."""

    size_bytes: int
    shares: bool


def owned(path: str) -> Owned:
    """What only this file has; raises `NotFound`."""
    with oserrors.translating(f"cannot measure {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _sum(fd)
        except OSError as err:
            if err.errno not in (errno.EOPNOTSUPP, errno.ENOTTY):
                raise
            return Owned(os.fstat(fd).st_blocks * _BLOCK_BYTES, shares=False)
        finally:
            os.close(fd)


def _sum(fd: int) -> Owned:
    own, shares = 0, False
    for each in fiemap.extents(fd, sync=False):
        shared = bool(each.flags & fiemap.SHARED)
        own += 0 if shared else each.length
        shares = shares or shared
    return Owned(own, shares)
