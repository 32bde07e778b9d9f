"""The loop driver's interface: ioctls, structures and sysfs names (include/uapi/linux/loop.h).

It raises `OSError`: its callers, `loop` and `holders`, know the meaning of each errno.
"""

import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from crust.core import volumes
from crust.host import answers
from crust.host.process import syscalls

CONFIGURE = 0x4C0A
CLEAR = 0x4C01
SET_CAPACITY = 0x4C07
_SET_STATUS64 = 0x4C04
_GET_STATUS64 = 0x4C05
CTL_GET_FREE = 0x4C82
_CTL_REMOVE = 0x4C81
BLKROSET = 0x125D

READ_ONLY = 1
AUTOCLEAR = 4
PARTITIONS = 8
DIRECT_IO = 16

_NAME_BYTES = 64
TAG_MAX_BYTES = _NAME_BYTES - 1

# struct loop_info64: device, inode, rdevice, offset, size limit; number, encrypt type, key size, flags;
# file name, crypt name, key; two words for a removed feature.
_INFO = struct.Struct("=5Q4I64s64s32s2Q")
# struct loop_config: descriptor, block size, loop_info64, reserved.
_CONFIG = struct.Struct(f"=2I{_INFO.size}s64s")
_SECTOR_BYTES = 512

_UEVENTS = 15  # NETLINK_KOBJECT_UEVENT
_GONE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Status:
    """The result of LOOP_GET_STATUS64. `device` and `inode` are st_dev and st_ino of the backing file.

    `backing_device` is the st_rdev of a backing block device; without `is_whole` there is an offset or a size limit.
    """

    device: int
    inode: int
    backing_device: int
    is_whole: bool
    flags: int
    name: str


def configuration(backing_fd: int, flags: int, name: str) -> bytes:
    """The argument of CONFIGURE. The kernel truncates the name and never reads it: the caller chooses it.

    The size of a sector is always set: the kernel would use the alignment that the file needs for direct I/O, which
    on xfs changes when the file shares blocks with a snapshot, and then a filesystem made with smaller sectors could
    not be mounted.
    """
    shown = os.fsencode(name)[:TAG_MAX_BYTES]
    info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, shown, b"", b"", 0, 0)
    return _CONFIG.pack(backing_fd, _SECTOR_BYTES, info, b"")


def ensure_node(number: int) -> str:
    """The path of a device's node, created if absent: a container's /dev does not follow the kernel."""
    path = f"/dev/loop{number}"
    try:
        os.stat(path)
    except FileNotFoundError:
        # the device has gone too, or the kernel has made the node meanwhile
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            device = identity(number)
            os.mknod(path, 0o660 | stat.S_IFBLK, os.makedev(device.major, device.minor))
    return path


def status(fd: int) -> Status:
    """The status of an attached device; ENXIO for a detached one."""
    info = _INFO.unpack(fcntl.ioctl(fd, _GET_STATUS64, bytes(_INFO.size)))
    device, inode, backing_device, offset, size_limit, _, _, _, flags, name, *_ = info
    is_whole, shown = not offset and not size_limit, os.fsdecode(name.partition(b"\0")[0])
    return Status(device, inode, backing_device, is_whole, flags, shown)


def set_flags(fd: int, flags: int) -> None:
    """Change the flags of an attached device; the kernel takes some of them, AUTOCLEAR too."""
    info = fcntl.ioctl(fd, _GET_STATUS64, bytes(_INFO.size))
    *before, _, name, crypt_name, key, init, rest = _INFO.unpack(info)
    fcntl.ioctl(fd, _SET_STATUS64, _INFO.pack(*before, flags, name, crypt_name, key, init, rest))


def make_writable(fd: int) -> None:
    """Undo a BLKROSET, which the kernel keeps when the device is detached."""
    fcntl.ioctl(fd, BLKROSET, bytes(4))


def attached_numbers() -> list[int]:
    """The numbers of the attached devices, ascending, in one read of /proc/partitions, without an open.

    It shows devices with a size; no other device takes a write. A kernel that hides removable disks there still shows
    loop devices.
    """
    names = (
        line.rpartition(b" ")[2] for line in syscalls.read_whole("/proc/partitions").split(b"\n")
    )
    numbers = (name.removeprefix(b"loop") for name in names if name.startswith(b"loop"))
    return sorted(int(number) for number in numbers if number.isdigit())  # loop0p1 is a partition


def attached() -> Iterator[tuple[int, str]]:
    """Each attached device's number and backing file, but for one that is detached meanwhile."""
    for number in attached_numbers():
        try:
            yield number, backing_file(number)
        except OSError as err:
            if err.errno not in (errno.ENOENT, errno.ENXIO, errno.ENODEV):
                raise


def is_bound(number: int) -> bool:
    """Whether a device is attached: the directory exists exactly as long. Raises `NotSeen`."""
    path = f"/sys/block/loop{number}/loop"
    answer = answers.ask(path, lambda: os.stat(path), absent=(errno.ENOENT,))
    return answers.seen(answer) is not None


def backing_file(number: int) -> str:
    """The full present path of the backing file, with " (deleted)" at its end if it was removed."""
    return syscalls.read_attribute(f"/sys/block/loop{number}/loop/backing_file")


def identity(number: int) -> volumes.DeviceIdentity:
    """Major, minor and disk sequence of a device. The minor is not always the number itself: with max_part set, every
    device reserves minors for partitions.
    """
    lines = syscalls.read_attribute(f"/sys/block/loop{number}/uevent").splitlines()
    fields = dict(line.split("=", 1) for line in lines)
    return volumes.DeviceIdentity(
        int(fields["MAJOR"]), int(fields["MINOR"]), int(fields["DISKSEQ"])
    )


def size_bytes(number: int) -> int:
    """The size of a device, 0 when it is not attached."""
    return int(syscalls.read_attribute(f"/sys/block/loop{number}/size")) * _SECTOR_BYTES


def frees_blocks(number: int) -> bool:
    """Whether a discard, or an unmapping write of zeros, frees blocks of the backing file, if its filesystem can."""
    queue = f"/sys/block/loop{number}/queue"
    most, possible = (
        int(syscalls.read_attribute(f"{queue}/{name}"))
        for name in ("discard_max_bytes", "discard_max_hw_bytes")
    )
    return bool(most) or not possible


def keep_blocks(number: int) -> None:
    """Refuse discards and unmapping writes of zeros until `remove`: no write to sysfs, and no detach, undoes it."""
    syscalls.write_attribute(f"/sys/block/loop{number}/queue/discard_max_bytes", b"0")


def remove(number: int) -> None:
    """Remove a detached device from the kernel, which makes a new one when it needs it. One that is in use stays."""
    with syscalls.closing(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)) as control:
        try:
            fcntl.ioctl(control, _CTL_REMOVE, number)
        except OSError as err:
            if err.errno not in (errno.EBUSY, errno.ENODEV):
                raise


def wait_until(is_done: Callable[[], bool]) -> bool:
    """Call `is_done` at every uevent of the kernel until it is true, or two seconds have passed."""
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_NETLINK, kind, _UEVENTS) as events:
        events.bind((0, 1))  # before the first look, so that no change is missed
        deadline = time.monotonic() + _GONE_TIMEOUT_S
        while not is_done():
            rest_s = deadline - time.monotonic()
            if rest_s <= 0 or not select.select([events], [], [], rest_s)[0]:
                return is_done()
            try:
                while events.recv(8192):
                    continue
            except OSError as err:
                # no more events, or an overflow: it checks again in both cases
                if err.errno not in (errno.EAGAIN, errno.ENOBUFS):
                    raise
    return True
