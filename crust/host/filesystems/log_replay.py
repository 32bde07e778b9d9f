"""Whether a filesystem's log waits for its replay: no kernel mounts that read-only from a device that is read-only.

The log of ext4 and btrfs is told by the superblock, that of xfs by its last record (kernel: fs/xfs/xfs_log_recover.c,
xlog_find_tail). A mount that may write replays it. Without a replay ("norecovery") a reader would miss what was
synced: that is never done here. A guest may have written each field; so what is no log is an error, and never clean.
"""

import bisect
import os
import struct
from collections.abc import Callable

from crust.core import errors
from crust.host.filesystems import superblocks
from crust.host.process import syscalls

_BLOCK_BYTES = 512
_RECORD_MAGIC = 0xFEEDBABE
_RECORD_BLOCKS_MAX = 520
"""256 KiB, the largest record, with its headers."""
_HEADER_BYTES = 32768
"""One block of a record's header describes so much of it."""
_UNMOUNT = 0x20  # XLOG_UNMOUNT_TRANS


def is_due(path: str, fs_type: str) -> bool:
    """Whether the log is to be replayed first; False for what is not the filesystem. Blocks.

    Not for a filesystem that is mounted. Raises `superblocks.InvalidSuperblock` for an xfs whose log lies outside.
    """
    superblock = superblocks.find(path, fs_type)
    if superblock is None or fs_type != "xfs":
        return superblock is not None and superblock.needs_replay
    with syscalls.opened(path, f"cannot read the log of {path}") as fd:
        start, length = _place(os.pread(fd, _BLOCK_BYTES, 0))
        if not 0 < start < start + length <= superblock.size_bytes:
            raise superblocks.InvalidSuperblock(path, fs_type, "its log is not inside of it")
        count = length // _BLOCK_BYTES
        return _ends_dirty(lambda number: os.pread(fd, 512, start + number % count * 512), count)


def check(volume: str, path: str, fs_type: str) -> None:
    """Raise `LogNotReplayed` if no guest can mount the filesystem read-only, and the errors of `is_due`. Blocks."""
    if is_due(path, fs_type):
        raise errors.NotReady.named(
            "LogNotReplayed",
            f"{volume} cannot be mounted read-only",
            why=f"its last user ended without an unmount, or it is a snapshot: the log of its {fs_type} must be "
            "replayed, and a read-only device takes no writes",
        )


def _place(superblock: bytes) -> tuple[int, int]:
    """Where the log begins, and its length, in bytes; the log of another device begins at 0."""
    block_bytes, first, group_blocks = (
        struct.unpack_from(code, superblock, offset)[0]
        for code, offset in ((">I", 4), (">Q", 48), (">I", 84))  # sb_blocksize, logstart, agblocks
    )
    group, block = first >> superblock[124], first & ((1 << superblock[124]) - 1)  # sb_agblklog
    (blocks,) = struct.unpack_from(">I", superblock, 96)  # sb_logblocks
    return (group * group_blocks + block) * block_bytes, blocks * block_bytes


def _ends_dirty(read: Callable[[int], bytes], count: int) -> bool:
    """Whether the last record is no unmount's. `read` gives a block of the log, which is a ring."""

    def cycle(number: int) -> int:
        first, second = struct.unpack_from(">II", read(number))  # h_magicno, h_cycle
        return int(second if first == _RECORD_MAGIC else first)

    begin = cycle(0)
    if not begin:
        return False  # nothing was ever written
    # the ring is written from its begin, each time with the next cycle: the blocks of the earlier one follow
    head = bisect.bisect_left(range(count), 1, key=lambda number: int(cycle(number) != begin))
    for number in range(head - 1, head - 1 - _RECORD_BLOCKS_MAX, -1):
        header = read(number)
        if struct.unpack_from(">I", header)[0] == _RECORD_MAGIC:
            break
    else:
        return True
    version, length, _, tail = struct.unpack_from(">IIQQ", header, 8)
    operations, size = (struct.unpack_from(">I", header, offset)[0] for offset in (40, 320))
    headers = max(-(-size // _HEADER_BYTES), 1) if version & 2 else 1
    if (tail & 0xFFFFFFFF) == head % count:
        return False
    is_last = (number + headers + -(-length // _BLOCK_BYTES)) % count == head % count
    is_unmount = operations == 1 and read(number + headers)[9] & _UNMOUNT  # oh_flags
    return not (is_last and is_unmount)
