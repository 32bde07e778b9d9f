"""What btrfstune leaves of a change of UUID that was cut short, undone.

It marks the superblock, writes the trees, and then writes the superblock anew. In between a btrfs of one device is as
it was but for the mark, with which neither a mount nor btrfstune itself takes it (btrfs-progs 6.2, Linux 6.18). The
first superblock is the last to lose the mark, so this too can be cut short and done again.

Source: btrfs-progs kernel-shared/ctree.h (struct btrfs_super_block, BTRFS_SUPER_FLAG_CHANGING_FSID_V2).
"""

import os
import struct

from crust.host.process import oserrors

_PLACES = (64 * 1024, 64 * 1024**2, 256 * 1024**3)
_SIZE_BYTES = 4096
_SUM_BYTES = 32
_FLAGS_AT = 0x38
_MAGIC_AT, _MAGIC = 0x40, b"_BHRfS_M"
_SUM_TYPE_AT, _CRC32C = 0xC4, 0
_CHANGING = 1 << 36


def settle(path: str) -> None:
    """Take the mark off every superblock that has it; one with a wrong checksum, or another kind, is left alone."""
    with oserrors.translating(f"cannot settle the UUID of the btrfs on {path}"):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            marked = [place for place in _PLACES if _is_marked(os.pread(fd, _SIZE_BYTES, place))]
            for place in reversed(marked):
                os.pwrite(fd, _unmarked(os.pread(fd, _SIZE_BYTES, place)), place)
                os.fsync(fd)
        finally:
            os.close(fd)


def _is_marked(block: bytes) -> bool:
    if len(block) < _SIZE_BYTES or not block.startswith(_MAGIC, _MAGIC_AT):
        return False
    (sum_type,) = struct.unpack_from("<H", block, _SUM_TYPE_AT)
    (flags,) = struct.unpack_from("<Q", block, _FLAGS_AT)
    return bool(flags & _CHANGING) and sum_type == _CRC32C and block.startswith(_sum(block))


def _unmarked(block: bytes) -> bytes:
    changed = bytearray(block)
    (flags,) = struct.unpack_from("<Q", block, _FLAGS_AT)
    struct.pack_into("<Q", changed, _FLAGS_AT, flags & ~_CHANGING)
    changed[:4] = _sum(changed)
    return bytes(changed)


def _sum(block: bytes | bytearray) -> bytes:
    """CRC-32C of what follows the checksum's own place."""
    crc = 0xFFFFFFFF
    for byte in block[_SUM_BYTES:]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return struct.pack("<I", crc ^ 0xFFFFFFFF)
