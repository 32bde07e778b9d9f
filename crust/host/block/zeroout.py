"""Making a complete block device read as zeros.

The zeros go through the device and not its backing file, so that no cache of the device keeps old bytes. Holes are
punched where the device can (fallocate(2) of a block device): BLKZEROOUT would allocate a loop device's complete
file. The device is held exclusively meanwhile, so the kernel refuses one that is mounted or used by a guest.
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
    """Discard everything on the device; raises `DeviceInUse` and changes nothing if it is in use."""
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
