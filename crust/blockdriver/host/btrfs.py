"""What differs on btrfs: direct writes, and the free space that statvfs(3) says.

Each direct write to a file makes an extent of its own, so clones get slow. Writes through the page cache make extents
of up to 128 MiB. With checksums btrfs turns direct writes into these.

statvfs(3) counts a write when btrfs commits a transaction, up to 30 s after an fsync(2) of it. Until then the bytes
of the write are in sysfs: `bytes_may_use` (in the page cache) and `bytes_reserved` (on the disk).

Source: Linux fs/btrfs/sysfs.c, space-info.h; include/uapi/linux/btrfs.h.
"""

import errno
import fcntl
import os
import uuid

from crust.host import answers
from crust.host.files.durable import AnyPath
from crust.host.process import syscalls

_FS_INFO = 0x8400941F  # _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args), 1024 bytes
_FS_INFO_BYTES = 1024
_ID = slice(16, 32)
_SYSFS = "/sys/fs/btrfs"
_DATA = ("data", "mixed")
"""The kinds of block groups that have data."""


def filesystem_id(directory: AnyPath) -> str:
    """The id of the btrfs that has the directory; empty on another filesystem."""
    info = bytearray(_FS_INFO_BYTES)
    with (
        syscalls.translating(f"cannot look at {directory}"),
        syscalls.closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as fd,
    ):
        try:
            fcntl.ioctl(fd, _FS_INFO, info)
        except OSError as err:
            if err.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL):
                return ""
            raise
    return str(uuid.UUID(bytes=bytes(info[_ID])))


def uncounted_bytes(directory: AnyPath) -> int:
    """The bytes of data that statvfs(3) still calls free; 0 on another filesystem. Raises `NotSeen`."""
    filesystem = filesystem_id(directory)
    if not filesystem:
        return 0
    home = f"{_SYSFS}/{filesystem}/allocation"
    kinds = answers.ask(f"the free space of {directory}", lambda: os.listdir(home), needs="/sys")
    names = [
        f"{home}/{kind}/{name}"
        for kind in answers.seen(kinds) or ()
        if kind in _DATA
        for name in ("bytes_may_use", "bytes_reserved")
    ]
    return sum(map(_number, names))


def _number(path: str) -> int:
    number = answers.seen(
        answers.ask(path, lambda: int(syscalls.read_attribute(path)), needs="/sys")
    )
    assert number is not None
    return number
