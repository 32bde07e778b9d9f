"""The attributes of files and directories, as chattr(1) sets them. Source: ioctl_iflags(2)."""

import array
import errno
import fcntl

IMMUTABLE = 0x10  # FS_IMMUTABLE_FL
NO_COPY_ON_WRITE = 0x800000  # FS_NOCOW_FL

_FS_IOC_GETFLAGS = 0x80086601  # _IOR('f', 1, long); the kernel writes an int all the same
_FS_IOC_SETFLAGS = 0x40086602  # _IOW('f', 2, long); it reads an int


def of(file: int) -> int | None:
    """The attributes of an open file; None on a filesystem that has none (NFS, 9p). Raises `OSError`."""
    flags = array.array("i", [0])
    try:
        fcntl.ioctl(file, _FS_IOC_GETFLAGS, flags)
    except OSError as err:
        if err.errno not in (errno.ENOTTY, errno.EOPNOTSUPP):
            raise
        return None
    return flags[0]


def change(file: int, attribute: int, wanted: int) -> int | None:
    """Have an attribute as in `wanted`; all attributes before, or None where there are none. Raises `OSError`."""
    before = of(file)
    if before is not None and (before ^ wanted) & attribute:
        fcntl.ioctl(file, _FS_IOC_SETFLAGS, array.array("i", [before ^ attribute]))
    return before
