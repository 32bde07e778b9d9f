"""Operations on a mounted filesystem: usage, grow to the disk's size, freeze, thaw, health condition.

Growing takes one ioctl, so the image needs no e2fsprogs and no xfsprogs. Sources: fs/ext4/ext4.h (the size is
in filesystem blocks, which are 1 KiB on small filesystems), fs/xfs/libxfs/xfs_fs.h,
include/uapi/linux/btrfs.h, include/uapi/linux/fs.h.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from . import devices, linux, protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_EXT4_SUPERBLOCK_AT = 1024
_EXT4_SUPERBLOCK_BYTES = 1024
_EXT4_64BIT = 0x80
_EXT4_IOC_RESIZE_FS = 0x40086610
_XFS_IOC_FSGEOMETRY_V1 = 0x80705864
_XFS_IOC_FSGROWFSDATA = 0x4010586E
_BTRFS_IOC_RESIZE = 0x50009403
_BTRFS_IOC_DEV_INFO = 0xD000941E
_BTRFS_SECTOR_BYTES = 4096
_FIFREEZE = 0xC0045877
_FITHAW = 0xC0045878
# struct xfs_fsop_geom_v1: 8 u32, 7 u64, uuid; imaxpct is the 8th u32, datablocks the first u64.
_XFS_GEOMETRY = struct.Struct("8I7Q16x")


def usage(path: str) -> dict[str, int]:
    """Bytes and inodes of a filesystem; `available` is the rest for an unprivileged writer."""
    stats = os.statvfs(path)
    return {
        "total_bytes": stats.f_blocks * stats.f_frsize,
        "available_bytes": stats.f_bavail * stats.f_frsize,
        "used_bytes": (stats.f_blocks - stats.f_bfree) * stats.f_frsize,
        "total_inodes": stats.f_files,
        "available_inodes": stats.f_favail,
        "used_inodes": stats.f_files - stats.f_ffree,
    }


def grow(path: str, fstype: str, disk_bytes: int) -> None:
    """Grow a mounted filesystem to the size of its disk; does nothing if it has that size.

    Faults: unsupported for a filesystem that cannot grow online. Raises OSError.
    """
    if fstype not in _GROW:
        raise protocol.Fault("unsupported", f"{fstype} cannot be grown while it is mounted")
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _GROW[fstype](root, disk_bytes)
    finally:
        os.close(root)


def flush(path: str) -> None:
    """Write all dirty pages to the disk."""
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        linux.sync_filesystem(root)
    finally:
        os.close(root)


def freeze(path: str) -> None:
    """FIFREEZE: flush and block all writers; frozen already is success."""
    _freeze_ioctl(path, _FIFREEZE, errno.EBUSY)


def thaw(path: str) -> bool:
    """FITHAW; returns whether it was frozen."""
    return _freeze_ioctl(path, _FITHAW, errno.EINVAL)


def _freeze_ioctl(path: str, request: int, already: int) -> bool:
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(root, request, 0)
    except OSError as err:
        if err.errno == already:
            return False
        raise
    finally:
        os.close(root)
    return True


def _grow_ext4(root: int, disk_bytes: int) -> None:
    wanted = disk_bytes // os.fstatvfs(root).f_frsize
    # Where nothing is to grow the ioctl reads the disk's last block all the same, and a disk may not answer.
    if _ext4_blocks(root) < wanted:
        fcntl.ioctl(root, _EXT4_IOC_RESIZE_FS, struct.pack("Q", wanted))


def _ext4_blocks(root: int) -> int:
    """How many blocks the filesystem has, by its superblock, which a mount keeps in the page cache."""
    number = os.fstat(root).st_dev
    link = os.readlink(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    device = os.open(f"/dev/{os.path.basename(link)}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        superblock = os.pread(device, _EXT4_SUPERBLOCK_BYTES, _EXT4_SUPERBLOCK_AT)
    finally:
        os.close(device)
    (low,) = struct.unpack_from("<I", superblock, 0x4)
    (features,) = struct.unpack_from("<I", superblock, 0x60)
    (high,) = struct.unpack_from("<I", superblock, 0x150) if features & _EXT4_64BIT else (0,)
    return int(low) | int(high) << 32


def _grow_xfs(root: int, disk_bytes: int) -> None:
    raw = fcntl.ioctl(root, _XFS_IOC_FSGEOMETRY_V1, bytes(_XFS_GEOMETRY.size))
    geometry = _XFS_GEOMETRY.unpack(raw)
    block_bytes, inode_percent, blocks = geometry[0], geometry[7], geometry[8]
    wanted = disk_bytes // block_bytes
    if wanted > blocks:
        fcntl.ioctl(root, _XFS_IOC_FSGROWFSDATA, struct.pack("QIxxxx", wanted, inode_percent))


def _grow_btrfs(root: int, disk_bytes: int) -> None:
    # A bytearray: Python copies an immutable argument, into 1024 bytes at most.
    device = bytearray(struct.pack("Q4088x", 1))
    fcntl.ioctl(root, _BTRFS_IOC_DEV_INFO, device)
    (total_bytes,) = struct.unpack_from("Q", device, 32)
    # The kernel refuses each resize of a btrfs below 256 MiB, also one that changes nothing.
    if total_bytes >= disk_bytes // _BTRFS_SECTOR_BYTES * _BTRFS_SECTOR_BYTES:
        return
    fcntl.ioctl(root, _BTRFS_IOC_RESIZE, bytearray(struct.pack("q4088s", 0, b"1:max")))


_GROW: dict[str, Callable[[int, int], None]] = {
    "ext4": _grow_ext4,
    "xfs": _grow_xfs,
    "btrfs": _grow_btrfs,
}


def condition(path: str, device: str | None, *, wanted_read_only: bool) -> str:
    """The fault of a mounted filesystem, in a sentence; empty if it has none.

    The kernel shows it in four places: the disk may be gone, an inode may not be readable (XFS after a
    shutdown, any filesystem without its disk), the mount may have turned read-only (ext4 errors=remount-ro,
    btrfs abort), and ext4 counts errors.
    """
    if device is not None and not devices.number(device):
        return f"disk {device} is gone while its filesystem is mounted"
    try:
        with os.scandir(path) as entries:
            next(entries, None)
        read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError as err:
        return f"the filesystem does not answer: {err.strerror}"
    if (read_only or _superblock_read_only(path)) and not wanted_read_only:
        return "the filesystem turned read-only after an error"
    count = _first_line(f"/sys/fs/ext4/{device}/errors_count")
    if count not in ("", "0"):
        return f"ext4 has recorded {count} errors; run fsck"
    return ""


def _superblock_read_only(path: str) -> bool:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as source:
        for line in source:
            fields, _, tail = line.partition(" - ")
            if fields.split(" ")[4] == path:
                flags = tail.split(" ")[2].strip().split(",")
                return not {"ro", "emergency_ro", "shutdown"}.isdisjoint(flags)
    return False


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as source:
            return source.readline().strip()
    except OSError:
        return ""
