"""Making a block device read as zeros, all of it.

Through the device and not its backing, so that no cache of it keeps the old bytes. Holes are punched where the
device can (fallocate(2) of a block device): BLKZEROOUT would make a loop device's file as large as it looks. The
device is held exclusively meanwhile, so that what is mounted or in a guest is refused by the kernel itself.
"""

import ctypes
import errno
import fcntl
import os
import struct

from crust.host.block import devices, holders
from crust.host.process import oserrors

_BLKZEROOUT = 0x127F
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def zero_device(path: str) -> None:
    """Discard everything on the device; raises `devices.DeviceInUse` and changes nothing if anyone has it."""
    length = devices.size_bytes(path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
    except OSError as err:
        if err.errno == errno.EBUSY:
            raise holders.device_in_use(path) from err
        raise oserrors.translate(err, f"cannot open {path}") from err
    with oserrors.translating(f"cannot clear {path}"):
        try:
            _zero(fd, length)
            os.fsync(fd)
        finally:
            os.close(fd)


def _zero(fd: int, length: int) -> None:
    if not _libc.fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, 0, length):
        return
    number = ctypes.get_errno()
    if number != errno.EOPNOTSUPP:
        raise OSError(number, os.strerror(number))
    fcntl.ioctl(fd, _BLKZEROOUT, struct.pack("QQ", 0, length))
