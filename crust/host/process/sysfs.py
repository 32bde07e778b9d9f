"""One attribute of sysfs or procfs, in three system calls where a text file of Python takes ten."""

import os

_LIMIT_BYTES = 4096
"""An attribute of sysfs is at most one page, and is read in one go."""


def read(path: str) -> str:
    """The attribute without its line end; names of files in it may hold any byte. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.fsdecode(os.read(fd, _LIMIT_BYTES)).removesuffix("\n")
    finally:
        os.close(fd)


def read_bytes(path: str) -> bytes:
    """A whole file, however long: procfs and cgroupfs have no limit. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(fd, _LIMIT_BYTES)]
        while parts[-1]:
            parts.append(os.read(fd, _LIMIT_BYTES))
    finally:
        os.close(fd)
    return b"".join(parts)
