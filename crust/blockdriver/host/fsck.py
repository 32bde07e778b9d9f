"""Checking an unmounted filesystem before it is mounted writable.

The kernel parses a filesystem only when it is mounted: a decision before that reads the superblock.
"""

import os
from collections.abc import Sequence

from crust.core import errors
from crust.host.block import devices, users
from crust.host.filesystems import superblocks
from crust.host.process import confined, workers

_TIMEOUT_S = 3600.0
_MEMORY_BYTES = 4 * 1024**3
_HALF_OF_RAM_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
_LIMITS = confined.Limits(
    memory_bytes=_MEMORY_BYTES,
    cpu_s=int(_TIMEOUT_S),
    at_once=max(2, _HALF_OF_RAM_BYTES // _MEMORY_BYTES),
)
"""Address space and processor time of an e2fsck are enough for some tens of terabytes.

All that run at once may take half of the node's memory. But two may always run: one volume whose check takes an hour
does not delay the checks of all others.
"""
_E2FSCK_UNCORRECTED, _E2FSCK_FAILED = 4, 8
_OUTPUT_TAIL_BYTES = 1024


async def check_filesystem(
    path: str, fs_type: str, *, completely: bool = False, inherits: Sequence[int] = ()
) -> bool:
    """Repair an unmounted filesystem as far as is safe without asking; whether anything was repaired.

    ext4: `e2fsck -p` unless the superblock says clean, or all of it is to be checked, `completely`. xfs and btrfs:
    only the superblock is read, because their mount replays the log, and xfs_repair refuses a log that is not
    replayed. e2fsck has the descriptors `inherits` open. Raises `DeviceInUse`, and `FilesystemNeedsRepair` and
    `FilesystemCheckFailed`, after which nothing may mount it writable.
    """
    superblock = await workers.run(superblocks.read, path, fs_type)
    is_whole = fs_type == "ext4" and completely
    if superblock.clean and not is_whole:
        return False
    # Of the status, bit 1 is "corrected" and bit 4 "left as it is"; from 8 on e2fsck itself failed, which is not
    # "clean", as callers of fsck(8) often believe.
    program = ["e2fsck", *(["-f"] if is_whole else []), "-p", confined.DEVICE]
    completed = await confined.run_confined(
        program, device=path, limits=_LIMITS, timeout_s=_TIMEOUT_S, writable=True, inherits=inherits
    )
    output = _tail(completed.stdout.decode("utf-8", "replace"), path)
    if completed.code >= _E2FSCK_FAILED:
        if await workers.run(lambda: users.is_held(devices.source(path))):
            raise await workers.run(users.in_use, path)
        raise errors.Corrupt.named(
            "FilesystemCheckFailed",
            f"the ext4 on {path} cannot be checked",
            why=_tail(completed.stderr_tail, path).strip() or "e2fsck failed without a message",
        )
    if completed.code & _E2FSCK_UNCORRECTED:
        raise errors.Corrupt.named(
            "FilesystemNeedsRepair",
            f"the ext4 on {path} is damaged",
            why=output.strip() or "e2fsck found errors that it does not correct unasked",
        )
    return completed.code != 0


def _tail(text: str, path: str) -> str:
    return text[-_OUTPUT_TAIL_BYTES:].replace(confined.DEVICE, path)
