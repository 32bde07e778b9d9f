"""What differs on btrfs: direct writes, shared extents, and the free space that statvfs(3) says.

Each direct write to a file makes an extent of its own, so clones get slow. Writes through the page cache make extents
of up to 128 MiB. With checksums btrfs turns direct writes into these.

statvfs(3) counts a write when btrfs commits a transaction, up to 30 s after an fsync(2) of it. Until then the bytes
of the write are in sysfs: `bytes_may_use` (in the page cache) and `bytes_reserved` (on the disk).

A write to a file without copy-on-write goes over its blocks, unless another file refers to any part of their extent:
then it takes new ones. An extent stays as a whole as long as a file refers to one block of it. A file that is deleted
refers to its extents until the next commit.

Source: Linux fs/btrfs/sysfs.c, space-info.h, inode.c (can_nocow_extent); include/uapi/linux/btrfs.h.
"""

import errno
import fcntl
import os
import uuid
from functools import partial

from crust.host import answers
from crust.host.files.durable import AnyPath
from crust.host.process import syscalls

_FS_INFO = 0x8400941F  # _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args), 1024 bytes
_START_SYNC = 0x80089418  # _IOR(0x94, 24, __u64): the number of a transaction
_WAIT_SYNC = 0x40089416  # _IOW(0x94, 22, __u64)
_FS_INFO_BYTES = 1024
_ID = slice(16, 32)
_SYSFS = "/sys/fs/btrfs"
_DATA = ("data", "mixed")
"""The kinds of block groups that have data."""


def filesystem_id(directory: AnyPath) -> str:
    """The id of the btrfs that has the directory; empty on another filesystem."""
    info = bytearray(_FS_INFO_BYTES)
    with syscalls.opened(directory, f"cannot look at {directory}", os.O_DIRECTORY) as fd:
        try:
            fcntl.ioctl(fd, _FS_INFO, info)
        except OSError as err:
            if err.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL):
                return ""
            raise
    return str(uuid.UUID(bytes=bytes(info[_ID])))


def commit(directory: AnyPath) -> None:
    """Commit the present transaction. Blocks as long as the disk takes."""
    with syscalls.opened(
        directory, f"cannot commit what was deleted in {directory}", os.O_DIRECTORY
    ) as fd:
        fcntl.ioctl(fd, _WAIT_SYNC, fcntl.ioctl(fd, _START_SYNC, bytes(8)))


def uncounted_bytes(directory: AnyPath) -> int:
    """The bytes of data that statvfs(3) of a directory on btrfs still calls free. Raises `NotSeen`."""
    home = f"{_SYSFS}/{filesystem_id(directory)}/allocation"
    kinds = answers.ask(f"the free space of {directory}", lambda: os.listdir(home), needs="/sys")
    names = [
        f"{home}/{kind}/{name}"
        for kind in answers.seen(kinds) or ()
        if kind in _DATA
        for name in ("bytes_may_use", "bytes_reserved")
    ]
    uncounted = 0
    for name in names:
        asked = answers.ask(name, partial(syscalls.read_attribute, name), needs="/sys")
        number = answers.seen(asked)
        assert number is not None
        uncounted += int(number)
    return uncounted
