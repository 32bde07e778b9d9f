"""One attribute of sysfs or procfs, in three system calls: a text file of Python's asks eight more things of it."""

import os

_LIMIT_BYTES = 4096
"""An attribute is at most one page."""


def read(path: str) -> str:
    """The attribute without its line end; names of files in it may hold any byte. Raises `OSError`."""
    return os.fsdecode(read_bytes(path)).removesuffix("\n")


def read_bytes(path: str) -> bytes:
    """The whole file, however long procfs makes it. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(fd, _LIMIT_BYTES)]
        while parts[-1]:
            parts.append(os.read(fd, _LIMIT_BYTES))
    finally:
        os.close(fd)
    return b"".join(parts)
