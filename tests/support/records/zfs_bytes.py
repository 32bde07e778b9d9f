"""The bytes of another machine's ZFS pool, as a disk image has them that a user keeps on a volume."""

import os
import struct
from pathlib import Path

_UBERBLOCK = struct.pack("<5Q", 0x00BAB10C, 28, 100, 200, 1700000000).ljust(1024, b"\0")
_LABEL_BYTES, _UBERBLOCKS_AT, _UBERBLOCKS = 256 * 1024, 128 * 1024, 128
"""ZFS has its labels twice at each end of a device; the second half of a label are uberblocks (libblkid's zfs.c)."""


def write(path: str | Path) -> None:
    """Write the last label's uberblocks: free blocks of a new filesystem, which keep what a deleted file had."""
    with open(path, "r+b") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(size_bytes // _LABEL_BYTES * _LABEL_BYTES - _LABEL_BYTES + _UBERBLOCKS_AT)
        file.write(_UBERBLOCK * _UBERBLOCKS)
        os.fsync(file.fileno())
