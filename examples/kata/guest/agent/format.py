"""Makes the filesystem of a volume that was created empty, if its disk is blank (specs/handoff.md, H-47).

The host says that the volume was created empty; the agent itself checks that the disk is blank, right before mkfs.
A disk on which anything is found is not changed: it is mounted as it is, and if that fails, a person decides. So an
mkfs that was interrupted is not repeated: its data cannot be told from another program's data.
"""

from __future__ import annotations

import os
import subprocess

from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    class Format(TypedDict):
        """Options of mkfs; they have an effect for ext4 only. None: mkfs chooses."""

        bytes_per_inode: int | None
        reserved_percent: int | None


_KIB = 1024
_MIB = 1024 * _KIB
_GIB = 1024 * _MIB
WINDOWS = (
    (0, _MIB),
    (2 * _MIB, 4 * _KIB),
    (4 * _MIB, 4 * _KIB),
    (8 * _MIB, 8 * _KIB),
    (32 * _MIB, 8 * _KIB),
    (64 * _MIB, 8 * _KIB),
    (128 * _MIB, 8 * _KIB),
    (256 * _GIB, 8 * _KIB),
    (-_MIB, _MIB),
)
"""(offset, length) of superblocks, partition tables and their copies; the host looks at the same ones
(crust/host/block/devices.py says whose they are). A negative offset counts from the end."""

_EXT4_LAZY = "nodiscard,lazy_itable_init=1,lazy_journal_init=1"
# No discard: a new disk has nothing to forget. Neither -F nor -f: mkfs then refuses known signatures by itself.
_MKFS = {
    "ext4": ("mke2fs", "-t", "ext4", "-q", "-b", "4096", "-I", "256", "-E", _EXT4_LAZY),
    "xfs": ("mkfs.xfs", "-q", "-K"),
    "btrfs": ("mkfs.btrfs", "-q", "-K"),
}
PROGRAMS = tuple(words[0] for words in _MKFS.values())
_HOME = "/usr/sbin"


def make_if_blank(disk: str, fstype: str, wanted: Format) -> bool:
    """Make the filesystem on a blank disk; returns whether it was made.

    Faults: unsupported; io_error if mkfs fails. Raises OSError for a disk that cannot be read.
    """
    check_known(fstype)
    if not is_blank(disk):
        return False
    make(disk, fstype, wanted)
    return True


def check_known(fstype: str) -> None:
    """Faults: unsupported."""
    if fstype not in _MKFS:
        raise protocol.Fault(
            "unsupported", f"this guest cannot make {fstype}", f"it makes {', '.join(_MKFS)}"
        )


def make(disk: str, fstype: str, wanted: Format) -> None:
    """Make the filesystem on a disk that the caller knows to be blank. Faults: io_error."""
    command = (*_MKFS[fstype], *(_ext4_options(wanted) if fstype == "ext4" else ()), disk)
    done = subprocess.run(
        (f"{_HOME}/{command[0]}", *command[1:]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PATH": _HOME},
        check=False,
    )
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()[-400:]
        raise protocol.Fault(
            "io_error",
            f"making {fstype} failed with status {done.returncode}: {reason}",
            "the volume is not mounted; if it is no longer blank, it is not formatted again",
        )
    _sync(disk)


def is_blank(disk: str) -> bool:
    """Whether every window reads as zeros; bytes beyond the end count as zeros."""
    fd = os.open(disk, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
        if not size:
            raise protocol.Fault("not_found", f"{disk} has no size", "attach the device again")
        return all(_is_zero(fd, offset, length, size) for offset, length in WINDOWS)
    finally:
        os.close(fd)


def _is_zero(fd: int, offset: int, length: int, size: int) -> bool:
    start = max(0, offset + size if offset < 0 else offset)
    end = min(start + length, size)
    while start < end:
        data = os.pread(fd, end - start, start)
        if not data:
            raise protocol.Fault("io_error", "the disk became shorter while it was read")
        if data.count(0) != len(data):
            return False
        start += len(data)
    return True


def _ext4_options(wanted: Format) -> tuple[str, ...]:
    """No reserve for root unless it is asked for: it would be lost space."""
    inode = wanted["bytes_per_inode"]
    reserved = ("-m", str(wanted["reserved_percent"] or 0))
    return reserved if inode is None else (*reserved, "-i", str(inode))


def _sync(disk: str) -> None:
    fd = os.open(disk, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
