"""Block devices: identity, size, nodes and partitions, exclusive opens, and blank or cleared content.

An exclusive open (O_EXCL) is at once the test and the lock. While the descriptor is open, mount(2) of the device gets
EBUSY and mkfs refuses; a hypervisor can still open the device plainly. While the device is mounted, the exclusive
open itself gets EBUSY. `zero_device` holds the device exclusively too, so it changes no device in use. It writes its
zeros through the device and not the backing file, so that no cache of the device keeps old bytes, and punches holes
where the device can (fallocate(2)): BLKZEROOUT would allocate a loop device's complete file.
"""

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable

from crust.core import errors, volumes
from crust.host import answers
from crust.host.block import device_sets, loopctl, users
from crust.host.process import syscalls

device_set = device_sets.device_set
"""Here, so that a caller may replace identity, set and exclusive opens together."""
_LOOKS_MAX = 4
_BLKZEROOUT = 0x127F
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_WAIT_WRITE_WAIT = 0x01 | 0x02 | 0x04
_SECTOR = 512
_KIB = 1024
_MIB = 1024 * _KIB
_GIB = 1024 * _MIB

# The first window has ext, xfs, btrfs, f2fs, gpt, dos, lvm, luks, md 1.1 and 1.2, bcache, zfs, iso, udf, swap.
PROBE_WINDOWS: tuple[tuple[int, int], ...] = (
    (0, _MIB),
    (2 * _MIB, 4 * _KIB),  # luks2, second header
    (4 * _MIB, 4 * _KIB),  # luks2, second header
    (8 * _MIB, 8 * _KIB),  # ext with 1 KiB blocks, backup superblock
    (32 * _MIB, 8 * _KIB),  # ext with 2 KiB blocks, backup
    (64 * _MIB, 8 * _KIB),  # btrfs, first mirror
    (128 * _MIB, 8 * _KIB),  # ext with 4 KiB blocks, backup
    (256 * _GIB, 8 * _KIB),  # btrfs, second mirror
    (-_MIB, _MIB),  # the end: gpt's backup, md 0.90 and 1.0, zfs, drbd, nilfs, bios raid
)
"""(offset, length) in bytes of superblocks and their copies; a negative offset counts from the end."""


class NotABlockDevice(errors.InvalidRequest):
    def __init__(self, path: str) -> None:
        super().__init__(f"{path} is not a block device")


class DeviceNodeMissing(errors.NotReady):
    def __init__(self, number: str, path: str) -> None:
        super().__init__(
            f"the block device {number} cannot be handed to a runtime",
            why=f"{path} is not its device node",
        )


def identify(path: str) -> volumes.DeviceIdentity:
    """The identity of the device; follows links (/dev/disk/by-id). Raises `NotFound`, `NotABlockDevice`."""
    number = _number(path)
    with syscalls.translating(
        f"cannot identify {path}", hint="check whether the device was detached and sysfs is mounted"
    ):
        return device_sets.identity_of(os.major(number), os.minor(number))


def source(path: str) -> volumes.BlockSource:
    """The device that the path leads to now. Raises as `identify` does."""
    return volumes.BlockSource(path, identify(path))


def of_number(number: int) -> volumes.BlockSource | None:
    """The device of a number (`st_rdev`), by its name in /dev, which may have no node there; None if it has gone.

    Raises `NotSeen`.
    """

    def look() -> volumes.BlockSource:
        identity = device_sets.identity_of(os.major(number), os.minor(number))
        return volumes.BlockSource(f"/dev/{_name(number)}", identity)

    return answers.seen(answers.ask(f"the device {_text(number)}", look, absent=syscalls.ABSENT))


def node_of(number: int) -> str:
    """The path of the device's node in /dev. Raises `DeviceNodeMissing`."""
    with syscalls.translating(
        f"cannot look at the device {_text(number)}", hint="check whether it was detached"
    ):
        path = f"/dev/{_name(number)}"
    try:
        status = os.stat(path)
    except OSError as err:
        raise DeviceNodeMissing(_text(number), path) from err
    if not stat.S_ISBLK(status.st_mode) or status.st_rdev != number:
        raise DeviceNodeMissing(_text(number), path)
    return path


def partition_of(number: int, partition: int) -> int:
    """The number of a partition's device; the device itself if it is that partition. Raises `PartitionMissing`."""
    directory = _directory(number)
    with syscalls.translating(f"cannot look at the partitions of {_text(number)}"):
        if syscalls.known_attribute(f"{directory}/partition") == str(partition):
            return number
        for name in os.listdir(directory):
            if syscalls.known_attribute(f"{directory}/{name}/partition") == str(partition):
                major, _, minor = syscalls.read_attribute(f"{directory}/{name}/dev").partition(":")
                return os.makedev(int(major), int(minor))
        name = _name(number)
    raise errors.NotReady.named(
        "PartitionMissing",
        f"{name or _text(number)} has no partition {partition}",
        why="the volume's context names it, and the kernel does not show it",
    )


def is_encrypted(number: int) -> bool:
    """Whether the device is a dm-crypt mapping: smaller than the device below it, by its header."""
    return syscalls.known_attribute(f"{_directory(number)}/dm/uuid").startswith("CRYPT-")


def size_bytes(path: str) -> int:
    """The size of the device now, from sysfs, without an open."""
    return int(_attribute(path, "size")) * _SECTOR


def size_of(identity: volumes.DeviceIdentity) -> int:
    """The size of a whole disk now; 0 when it was detached, or another disk has its number. Opens no device."""
    directory = f"{device_sets.BY_NUMBER}/{identity.major}:{identity.minor}"
    with syscalls.translating(f"cannot look at {directory}"):
        try:
            is_same = syscalls.read_attribute(f"{directory}/diskseq") == str(identity.disk_sequence)
            return int(syscalls.read_attribute(f"{directory}/size")) * _SECTOR if is_same else 0
        except FileNotFoundError:
            return 0  # the number itself was removed


def open_exclusive(path: str, access: int = os.O_RDONLY) -> int:
    """Open the device with O_EXCL: no mount and no mkfs until the descriptor is closed. Raises `DeviceInUse`.

    A proxy's or a tool's probe holds a device for a moment. If the search for its holder, which takes milliseconds,
    finds none, it tries again.
    """
    _number(path)
    for attempt in range(_LOOKS_MAX):
        fd = try_exclusive(path, access)
        if fd is not None:
            return fd
        busy = users.in_use(path)
        if busy.is_explained or attempt == _LOOKS_MAX - 1:
            break
    raise busy


def open_shared(path: str) -> int:
    """Open the device for reading: it is not detached until the last copy of the descriptor is closed."""
    with syscalls.translating(f"cannot open {path}"):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def sync(path: str) -> None:
    """Write back the dirty pages of the device, durably: all writes to its node."""
    with syscalls.opened(path, f"cannot write back {path}") as fd:
        os.fsync(fd)


def write_back(path: str) -> None:
    """Give the storage all writes to the device's node, sync_file_range(2): a look at it then misses none.

    It flushes no cache of a disk, so it does not replace `sync`.
    """
    with syscalls.opened(path, f"cannot write back {path}") as fd:
        syscalls.sync_file_range(fd, 0, 0, _WAIT_WRITE_WAIT)


def try_exclusive(path: str, access: int = os.O_RDONLY) -> int | None:
    """Like `open_exclusive`; None, without a search for the holder, while the device is in use."""
    with syscalls.translating(f"cannot open {path} exclusively"):
        try:
            return os.open(path, access | os.O_EXCL | os.O_CLOEXEC)
        except OSError as err:
            if err.errno == errno.EBUSY:
                return None
            raise


def set_readonly(path: str, *, readonly: bool) -> None:
    """Let the device itself refuse writes, or accept them again (BLKROSET)."""
    with syscalls.opened(path, f"cannot set {path} read-only or writable") as fd:
        fcntl.ioctl(fd, loopctl.BLKROSET, struct.pack("i", int(readonly)))


def is_readonly(path: str) -> bool:
    return _attribute(path, "ro") == "1"


def is_blank(path: str, windows: Iterable[tuple[int, int]] = PROBE_WINDOWS) -> bool:
    """Whether the (offset, length) windows of a device or a file hold only zeros; beyond the end counts as zeros.

    Raises `CrustError` for an unreadable device.
    """
    with syscalls.opened(
        path, f"cannot read {path}", os.O_NONBLOCK, hint="an unreadable device is never formatted"
    ) as fd:
        size = os.lseek(fd, 0, os.SEEK_END)
        if not size:  # a device that was detached meanwhile: "blank" would be true of it
            raise errors.NotReady(f"{path} has no size", hint="attach it first")
        for offset, length in windows:
            start = max(0, offset + size if offset < 0 else offset)
            end = min(start + length, size)
            while start < end:
                data = os.pread(fd, min(_MIB, end - start), start)
                if not data:
                    raise OSError(errno.EIO, "the device became shorter while it was read")
                if data.count(0) != len(data):
                    return False
                start += len(data)
    return True


def _number(path: str) -> int:
    with syscalls.translating(f"cannot look at {path}"):
        status = os.stat(path)
    if not stat.S_ISBLK(status.st_mode):
        raise NotABlockDevice(path)
    return status.st_rdev


def _attribute(path: str, name: str) -> str:
    directory = _directory(_number(path))
    with syscalls.translating(
        f"cannot read {name} of {path}",
        hint="check whether the device was detached and sysfs is mounted",
    ):
        return syscalls.read_attribute(f"{directory}/{name}")


def _name(number: int) -> str:
    """The name of a device in /dev; empty if it has none. Raises `OSError`."""
    lines = syscalls.read_attribute(f"{_directory(number)}/uevent").splitlines()
    return next(
        (line.removeprefix("DEVNAME=") for line in lines if line.startswith("DEVNAME=")), ""
    )


def _directory(number: int) -> str:
    return f"{device_sets.BY_NUMBER}/{_text(number)}"


def _text(number: int) -> str:
    return f"{os.major(number)}:{os.minor(number)}"


def zero_device(path: str) -> None:
    """Discard everything on the device; raises `DeviceInUse` and changes nothing if it is in use."""
    with (
        syscalls.closing(open_exclusive(path, os.O_RDWR)) as fd,
        syscalls.translating(f"cannot clear {path}"),
    ):
        length = os.lseek(fd, 0, os.SEEK_END)
        try:
            syscalls.fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, 0, length)
        except OSError as err:
            if err.errno != errno.EOPNOTSUPP:
                raise
            fcntl.ioctl(fd, _BLKZEROOUT, struct.pack("QQ", 0, length))
        os.fsync(fd)
