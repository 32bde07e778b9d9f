"""The superblock fields that crust decides by, read with one pread and no program.

Formats: Linux Documentation/filesystems/ext4/super.rst; xfs on-disk format, struct xfs_dsb. For a filesystem that
is *not* mounted: a mounted xfs keeps its present state in memory and in its log.

A guest may have written each field. So crust checks each against the format before it computes with it: a block size
is a power of two within the format's bounds, and a filesystem is not larger than its device.
"""

import os
import struct
import uuid
from dataclasses import dataclass

from crust.core import errors
from crust.host.filesystems import mkfs
from crust.host.process import syscalls

_EXT_OFFSET = 1024
_EXT_MAGIC = 0xEF53
_EXT_VALID, _EXT_ERRORS = 0x1, 0x2
_EXT_INCOMPAT_RECOVER = 0x4
_EXT_INCOMPAT_META_BG = 0x10
_EXT_INCOMPAT_EXTENTS = 0x40
_EXT_INCOMPAT_64BIT = 0x80
_EXT_RO_COMPAT_SPARSE_SUPER = 0x1
_EXT_RO_COMPAT_ORPHANS = 0x10000
_EXT_COMPAT_SPARSE_SUPER2 = 0x200
_EXT_LEAST_DATA_BLOCKS = 50
"""What a last group must hold beside its tables, else resize2fs leaves it out (adjust_fs_info)."""
_EXT_LOG_BLOCK_SIZE_MAX = 6
_EXT_KERNELS_BLOCKS = 4096
"""What a mount reserves at most beside root's (ext4_calculate_resv_clusters): 2 % of all, without bigalloc."""
_XFS_MAGIC = b"XFSB"
_XFS_IN_PROGRESS = 126
_XFS_LEAST_GROUP_BLOCKS = 64
"""The kernel adds no smaller last group (XFS_MIN_AG_BLOCKS)."""
_PAGE_BYTES = 65536
"""The largest page: mkfs and resize2fs leave a part of a page at the end of a device."""
_BTRFS_OFFSET = 64 * 1024
_BTRFS_MAGIC = b"_BHRfS_M"
_BLOCK_SIZES = {"ext4": (1024, 65536), "xfs": (512, 65536), "btrfs": (4096, 65536)}
"""The smallest and the largest block (btrfs: sector) that the format has, in bytes."""


class InvalidSuperblock(errors.Corrupt):
    def __init__(
        self, path: str, fs_type: str, why: str = "the magic number of its superblock differs"
    ) -> None:
        super().__init__(f"{path} does not hold {fs_type}", why=why)


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of an ext4 or xfs, in its own blocks. The last one may be smaller, but not than `least`."""

    first_block: int
    blocks: int
    least: int
    descriptors: int = 0
    """How many groups one block of descriptors has; 0: no group has a copy of them."""
    reserved: int = 0
    is_sparse: bool = True


@dataclass(frozen=True, slots=True)
class Superblock:
    """Size of the filesystem in its own blocks. `clean` is false when a check is due.

    `complete` is false while its mkfs has not ended; ext4 and btrfs have no superblock until then. `reserved_blocks`
    are not for ordinary users: root's, and what the kernel keeps for its own delayed work (fs/ext4/super.c).
    """

    block_size_bytes: int
    blocks: int
    clean: bool
    uuid: str
    complete: bool = True
    reserved_blocks: int = 0
    groups: _Groups | None = None
    needs_replay: bool = False
    """Of ext4 and btrfs: the log of an xfs does not show in its superblock."""

    def grown_bytes(self, device_bytes: int) -> int:
        """The size that the filesystem gets when it is grown to a device of this size."""
        blocks = device_bytes // _PAGE_BYTES * _PAGE_BYTES // self.block_size_bytes
        if (groups := self.groups) is None:
            return blocks * self.block_size_bytes
        count, rest = divmod(blocks - groups.first_block, groups.blocks)
        # with sparse_super the groups 0, 1, and powers of 3, 5 and 7 have a copy of the superblock
        powers = (base**power for base in (3, 5, 7) for power in range(1, 21))
        has_copy = not groups.is_sparse or count <= 1 or count in powers
        least = groups.least
        if groups.descriptors and has_copy:
            least += 1 + count // groups.descriptors + 1 + groups.reserved
        # no group takes the rest if the last one would be too small
        left_out = rest if count > 0 and rest < least else 0
        return (blocks - left_out) * self.block_size_bytes

    @property
    def size_bytes(self) -> int:
        """The part of the device that the filesystem uses."""
        return self.block_size_bytes * self.blocks


def read_ext4(path: str) -> Superblock:
    """The superblock of an ext2, ext3 or ext4; raises `InvalidSuperblock`."""
    data, device_bytes = _read(path, _EXT_OFFSET)
    if _field("<H", data, 0x38) != _EXT_MAGIC:
        raise InvalidSuperblock(path, "ext4")
    incompat = _field("<I", data, 0x60)  # s_feature_incompat
    high = _field("<I", data, 0x150) if incompat & _EXT_INCOMPAT_64BIT else 0  # s_blocks_count_hi
    shift = _field("<I", data, 0x18)  # s_log_block_size
    if shift > _EXT_LOG_BLOCK_SIZE_MAX:
        raise InvalidSuperblock(path, "ext4", f"its blocks have 1024 << {shift} bytes")
    block_bytes = 1024 << shift
    blocks = high << 32 | _field("<I", data, 0x04)  # s_blocks_count_lo
    high = _field("<I", data, 0x154) if incompat & _EXT_INCOMPAT_64BIT else 0  # s_r_blocks_count_hi
    kernels = min(blocks // 50, _EXT_KERNELS_BLOCKS) if incompat & _EXT_INCOMPAT_EXTENTS else 0
    # s_inodes_per_group, s_inode_size; s_desc_size
    inode_bytes = _field("<I", data, 0x28) * (_field("<H", data, 0x58) or 128)
    descriptor_bytes = max(_field("<H", data, 0xFE) if incompat & _EXT_INCOMPAT_64BIT else 0, 32)
    has_copies = not incompat & _EXT_INCOMPAT_META_BG
    is_sparse = _field("<I", data, 0x64) & _EXT_RO_COMPAT_SPARSE_SUPER  # s_feature_ro_compat
    # with sparse_super2 a copy goes to the new last group
    has_last = _field("<I", data, 0x5C) & _EXT_COMPAT_SPARSE_SUPER2  # s_feature_compat
    groups = _Groups(
        first_block=_field("<I", data, 0x14),  # s_first_data_block
        blocks=max(_field("<I", data, 0x20), 1),  # s_blocks_per_group
        least=2 + -(-inode_bytes // block_bytes) + _EXT_LEAST_DATA_BLOCKS,
        descriptors=max(block_bytes // descriptor_bytes, 1) if has_copies else 0,
        reserved=_field("<H", data, 0xCE),  # s_reserved_gdt_blocks
        is_sparse=bool(is_sparse and not has_last),
    )
    superblock = Superblock(
        block_size_bytes=block_bytes,
        blocks=blocks,
        clean=_is_clean(data, incompat),
        uuid=_uuid(data, 0x68),
        reserved_blocks=(high << 32 | _field("<I", data, 0x08)) + kernels,  # s_r_blocks_count_lo
        groups=groups,
        needs_replay=bool(incompat & _EXT_INCOMPAT_RECOVER),
    )
    return _checked(superblock, path, "ext4", device_bytes)


def read_xfs(path: str) -> Superblock:
    """The first superblock of an xfs; raises `InvalidSuperblock`. A mount replays its log, so it is "clean"."""
    data, device_bytes = _read(path, 0)
    if data[:4] != _XFS_MAGIC:
        raise InvalidSuperblock(path, "xfs")
    superblock = Superblock(
        block_size_bytes=_field(">I", data, 4),  # sb_blocksize
        blocks=_field(">Q", data, 8),  # sb_dblocks
        clean=True,
        uuid=_uuid(data, 32),
        complete=not data[_XFS_IN_PROGRESS],
        groups=_Groups(0, max(_field(">I", data, 84), 1), _XFS_LEAST_GROUP_BLOCKS),  # sb_agblocks
    )
    return _checked(superblock, path, "xfs", device_bytes)


def read_btrfs(path: str) -> Superblock:
    """The first superblock of a btrfs on one device; raises `InvalidSuperblock`. Mounts replay its log."""
    data, device_bytes = _read(path, _BTRFS_OFFSET)
    if data[0x40:0x48] != _BTRFS_MAGIC:
        raise InvalidSuperblock(path, "btrfs")
    sector_bytes = _field("<I", data, 0x90)  # sectorsize
    if not sector_bytes:
        raise InvalidSuperblock(path, "btrfs", "its sectors have 0 bytes")
    blocks = _field("<Q", data, 0x70) // sector_bytes  # total_bytes
    superblock = Superblock(
        *(sector_bytes, blocks, True, _uuid(data, 0x20)),
        needs_replay=bool(_field("<Q", data, 0x60)),  # log_root
    )
    return _checked(superblock, path, "btrfs", device_bytes)


_READERS = mkfs.Table(ext4=read_ext4, xfs=read_xfs, btrfs=read_btrfs)


def read(path: str, fs_type: str) -> Superblock:
    """The superblock on a device or in a file; raises `InvalidSuperblock`, `UnknownFilesystem`."""
    return _READERS[fs_type](path)


def find(path: str, fs_type: str) -> Superblock | None:
    """The superblock on the device, None if it is not that of the filesystem: one read, where a probe makes many.

    Alone only for a device with this filesystem by the caller's own record: any other device is probed first
    (`signatures.probe`). If it is `clean`, `fsck.check_filesystem` would find nothing to do.
    """
    try:
        return read(path, fs_type)
    except InvalidSuperblock:
        return None


def fsid_of_btrfs(path: str) -> str:
    """The UUID by which the kernel identifies a btrfs."""
    return _uuid(_read(path, _BTRFS_OFFSET)[0], 0x20)


def _checked(superblock: Superblock, path: str, fs_type: str, device_bytes: int) -> Superblock:
    size, bounds = superblock.block_size_bytes, _BLOCK_SIZES[fs_type]
    if size & (size - 1) or not bounds[0] <= size <= bounds[1]:
        raise InvalidSuperblock(path, fs_type, f"its blocks have {size} bytes")
    if not 0 < superblock.size_bytes <= device_bytes:
        why = f"it says {superblock.size_bytes} bytes, and its device has {device_bytes}"
        raise InvalidSuperblock(path, fs_type, why)
    return superblock


def _is_clean(data: bytes, incompat: int) -> bool:
    """The fields that e2fsck reads before it reports "clean"."""
    state = _field("<H", data, 0x3A)  # s_state
    if not state & _EXT_VALID or state & _EXT_ERRORS or incompat & _EXT_INCOMPAT_RECOVER:
        return False
    # s_last_orphan, s_feature_ro_compat
    if _field("<I", data, 0xE8) or _field("<I", data, 0x64) & _EXT_RO_COMPAT_ORPHANS:
        return False
    # s_mnt_count, s_max_mnt_count
    mounts, limit = _field("<H", data, 0x34), _field("<h", data, 0x36)
    interval = _field("<I", data, 0x44)  # s_checkinterval
    return not interval and (limit <= 0 or mounts < limit)


def _uuid(data: bytes, offset: int) -> str:
    return str(uuid.UUID(bytes=data[offset : offset + 16]))


def _field(code: str, data: bytes, offset: int) -> int:
    value: int = struct.unpack_from(code, data, offset)[0]
    return value


def _read(path: str, offset: int) -> tuple[bytes, int]:
    """1024 bytes at the offset, and the size of the device."""
    with syscalls.opened(path, f"cannot read the superblock of {path}") as fd:
        return os.pread(fd, 1024, offset).ljust(1024, b"\0"), os.lseek(fd, 0, os.SEEK_END)
