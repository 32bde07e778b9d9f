"""Attributes of sysfs and procfs, in three system calls where a text file of Python takes ten."""

import os

from crust.host.process import oserrors, syscalls

_LIMIT_BYTES = 4096
"""An attribute of sysfs is at most one page, and is read in one go."""


def read(path: str) -> str:
    """The attribute without its line end; names of files in it may hold any byte. Raises `OSError`."""
    with syscalls.closing(os.open(path, os.O_RDONLY)) as fd:
        return os.fsdecode(os.read(fd, _LIMIT_BYTES)).removesuffix("\n")


def known(path: str) -> str:
    """The attribute as `read` gives it; empty if it is not there, or its device has just gone."""
    try:
        return read(path)
    except OSError:
        return ""


def names(directory: str) -> list[str]:
    """The names in a directory; none if it is not there, or its device or process has just gone."""
    try:
        return os.listdir(directory)
    except OSError:
        return []


def read_bytes(path: str) -> bytes:
    """A whole file, however long: procfs and cgroupfs have no limit. Raises `OSError`."""
    with syscalls.closing(os.open(path, os.O_RDONLY)) as fd:
        parts = [os.read(fd, _LIMIT_BYTES)]
        while parts[-1]:
            parts.append(os.read(fd, _LIMIT_BYTES))
    return b"".join(parts)


def write(path: str, data: bytes) -> None:
    """Write an attribute in one call. Raises `OSError`."""
    with syscalls.closing(os.open(path, os.O_WRONLY)) as fd:
        os.write(fd, data)


def boot_id() -> str:
    """The kernel's random id of this boot (random(4)): a record with another one is from before a reboot."""
    with oserrors.translating("cannot read the boot id"):
        return read("/proc/sys/kernel/random/boot_id")
