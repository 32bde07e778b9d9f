"""Loop devices are attached and detached by ioctl: attach takes 0.1 ms, where losetup(8) takes 2.

The kernel leaves three races to its callers. One file can be attached twice without an error: `attach_once` looks and
attaches under a lock on the file. Clearing a device that is open reports success and happens later: `detach` refuses
a device in use, and afterwards verifies that it is detached. A loop number is reused at once: everything that acts on
a device compares its disk sequence first. What is attached, and of which file, is found by `loop_devices`.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from crust.core import errors
from crust.host.block import holders, loop_devices, loopctl
from crust.host.block.loop_devices import LoopDevice
from crust.host.files import flocks, sparse
from crust.host.files.held_directory import AnyPath
from crust.host.process import oserrors, syscalls

_ATTEMPTS = 1000


class LoopDeviceHeld(errors.NotReady):
    """A loop device stays attached, unchanged: it is open, mounted, or part of another device."""

    def __init__(self, path: str, in_use: holders.DeviceInUse) -> None:
        super().__init__(
            f"{path} is not detached",
            why=in_use.why,
            hint="stop or release what holds it; the detach is then retried",
        )
        self.path = path
        self.holders = in_use.holders
        self.stacked = in_use.stacked


class LoopAttachedDifferently(errors.Conflict):
    """The file has loop devices already, but not as requested."""

    def __init__(self, backing: str, devices: tuple[LoopDevice, ...], why: str) -> None:
        paths = ", ".join(device.path for device in devices)
        super().__init__(
            f"{backing} is attached at {paths}",
            why=why,
            hint="detach it first (losetup -d)",
        )
        self.backing = backing
        self.devices = devices


def attach(
    backing: AnyPath,
    *,
    readonly: bool = False,
    direct_io: bool = True,
    sector_size: int | None = None,
    tag: str = "",
) -> LoopDevice:
    """Attach the file to a free loop device, even if it is attached already; see `attach_once`.

    A size that is no multiple of the sector is rounded down by the kernel. Without direct I/O on the backing
    filesystem the device is buffered, and `direct_io` of the result is false. Raises `NotFound`, `Refused`,
    `NoFreeLoopDevice`.
    """
    with _open_backing(backing, readonly=readonly) as fd:
        return _attach(
            fd, backing, _flags(readonly=readonly, direct_io=direct_io), sector_size or 0, tag
        )


@contextmanager
def scratch(size_bytes: int) -> Iterator[str]:
    """The path of a blank device in memory, while the block runs.

    The kernel detaches it at its last close, so a process that is killed leaves nothing.
    """
    with (
        oserrors.translating("cannot make a scratch device"),
        syscalls.closing(os.memfd_create("crust-scratch")) as memory,
    ):
        os.ftruncate(memory, size_bytes)
        number, fd = _configure(memory, "crust-scratch", loopctl.AUTOCLEAR, 0, "")
    try:
        yield loopctl.node(number)
    finally:
        os.close(fd)


def attach_once(
    backing: AnyPath,
    *,
    readonly: bool = False,
    direct_io: bool = True,
    sector_size: int | None = None,
    tag: str = "",
) -> LoopDevice:
    """The only loop device of the file: the existing one, unchanged, or a new one with up to 63 bytes of `tag`.

    Raises `LoopAttachPending`, `LoopAttachedDifferently` (other read-only state, a part of the file, more than one
    device), and what `attach` raises. Two processes that call this never attach twice.
    """
    with _open_backing(backing, readonly=readonly) as fd:
        if not flocks.try_lock(fd):
            raise errors.OperationPending.named(
                "LoopAttachPending",
                f"{backing} is being attached by another process",
                hint="retry",
            )
        try:
            if found := loop_devices.of_open_file(fd):
                return _the_one(backing, found, readonly=readonly)
            flags = _flags(readonly=readonly, direct_io=direct_io)
            return _attach(fd, backing, flags, sector_size or 0, tag)
        finally:
            flocks.unlock(fd)


def refresh_size(device: LoopDevice) -> None:
    """Make the device as large as its file now is (LOOP_SET_CAPACITY): growing the file does not change it."""
    with (
        oserrors.translating(f"cannot resize {device.path}"),
        loop_devices.opened(device.path) as fd,
    ):
        if not loop_devices.is_same(device, fd):
            raise errors.NotFound(f"{device.path} is no longer attached to {device.backing}")
        fcntl.ioctl(fd, loopctl.SET_CAPACITY)


def detach(device: LoopDevice) -> None:
    """Detach the device and verify it; a detached one, or a reused number, is a success.

    Raises `LoopDeviceHeld` when it is mounted or open anywhere; it then stays attached, unchanged.
    """
    if not loop_devices.is_attached(device):
        # Before the open: on a reused number the exclusive open would make the new owner's mount or mkfs fail for
        # a moment.
        return
    with oserrors.translating(f"cannot detach {device.path}"):
        try:
            # O_EXCL: refused while the device is mounted or held with O_EXCL, before anything has changed.
            fd = os.open(device.path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
        except OSError as err:
            if err.errno == errno.EBUSY:
                raise LoopDeviceHeld(device.path, holders.device_in_use(device.path)) from err
            if err.errno in (errno.ENOENT, errno.ENXIO):
                return
            raise
        _clear(device, fd)
        if loop_devices.is_attached(device):
            _wait_until_gone(device)


def _attach(
    backing_fd: int, backing: AnyPath, flags: int, sector_size: int, tag: str = ""
) -> LoopDevice:
    with oserrors.translating(f"cannot attach {backing} to a loop device"):
        number, fd = _configure(backing_fd, str(backing), flags, sector_size, tag)
        try:
            return loop_devices.describe(number, loopctl.status(fd))
        finally:
            os.close(fd)


def _configure(
    backing_fd: int, backing: str, flags: int, sector_size: int, tag: str
) -> tuple[int, int]:
    """Attach to a free number; returns it and an open descriptor of the device."""
    config = loopctl.configuration(backing_fd, flags, sector_size, tag or backing)
    mode = os.O_RDONLY if flags & loopctl.READ_ONLY else os.O_RDWR
    for _ in range(_ATTEMPTS):
        number, fd = loopctl.free_number(), -1
        try:
            fd = os.open(loopctl.node(number), mode | os.O_CLOEXEC)
            fcntl.ioctl(fd, loopctl.CONFIGURE, config)
            if not flags & loopctl.READ_ONLY:
                loopctl.make_writable(fd)
        except OSError as err:
            if fd >= 0:
                os.close(fd)
            # Between "number is free" and now another caller took it (EBUSY), or removed it (ENXIO, ENOENT).
            if err.errno not in (errno.EBUSY, errno.ENXIO, errno.ENOENT):
                raise
        else:
            return number, fd
    raise errors.Exhausted.named(
        "NoFreeLoopDevice",
        f"no loop device for {backing}",
        why=f"other processes took the free device {_ATTEMPTS} times",
        hint="retry; look for a process that attaches loop devices in a loop",
    )


def _clear(device: LoopDevice, fd: int) -> None:
    # While this descriptor is open the number cannot be given to another file, so the comparison holds.
    try:
        if loop_devices.is_same(device, fd):
            loopctl.make_writable(fd)  # the next user of the number may not check
            fcntl.ioctl(fd, loopctl.CLEAR)
    finally:
        os.close(fd)


def _wait_until_gone(device: LoopDevice) -> None:
    """Wait for another opener of the device: udev's probe ends in a moment; a longer one is an error."""
    with loopctl.Changes() as changes:
        if changes.wait_until(lambda: not loop_devices.is_attached(device)):
            return
    _keep(device)
    raise LoopDeviceHeld(device.path, holders.device_in_use(device.path))


def _keep(device: LoopDevice) -> None:
    """Undo the refused clear, which left a device that would be detached at its holder's last close."""
    try:
        with loop_devices.opened(device.path) as fd:
            if loop_devices.is_same(device, fd):
                loopctl.set_flags(fd, loopctl.status(fd).flags & ~loopctl.AUTOCLEAR)
    except (FileNotFoundError, errors.NotFound):
        return


def _the_one(backing: AnyPath, found: tuple[LoopDevice, ...], *, readonly: bool) -> LoopDevice:
    if len(found) > 1:
        raise LoopAttachedDifferently(
            str(backing), found, "more than one device writes into one file"
        )
    if found[0].readonly != readonly:
        state = "read-only" if found[0].readonly else "writable"
        raise LoopAttachedDifferently(str(backing), found, f"that device is {state}")
    if not found[0].is_whole:
        raise LoopAttachedDifferently(
            str(backing), found, "that device has an offset or a size limit"
        )
    return found[0]


def _flags(*, readonly: bool, direct_io: bool) -> int:
    return loopctl.READ_ONLY * readonly | loopctl.DIRECT_IO * direct_io


@contextmanager
def _open_backing(backing: AnyPath, *, readonly: bool) -> Iterator[int]:
    with oserrors.translating(f"cannot open {backing}"):
        flags = os.O_RDONLY if readonly else os.O_RDWR
        fd = sparse.open_file(backing, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise errors.InvalidRequest(
                f"{backing} cannot back a loop device", why="it is not a regular file"
            )
        yield fd
    finally:
        os.close(fd)
