"""Loop devices are attached and detached by ioctl: attach takes 0.1 ms, where losetup(8) takes 2.

The kernel leaves three races to its callers. It attaches one file twice without an error: `attach` with `once` looks
and attaches under a lock on the file. It reports success for the clear of an open device and clears it later:
`detach` refuses a device in use, and afterwards verifies that it is detached. It reuses a loop number at once: every
function that acts on a device compares its disk sequence first.

A device and a file match by (device, inode), never by name: the kernel cuts names at 63 bytes, and they go stale. The
name that the kernel keeps is the attacher's own mark, a `tag`: it survives the file. But both are visible only to a
process that opens the device, and the kernel then asks the filesystem of the backing file: a search would hang with
one file server. So a search first compares the last part of the backing file's present path, which sysfs shows
without the file, and opens only devices whose file has the name. It does not find a file that root bound over a file
of another name; for a file with several names it opens every device.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crust.core import errors, volumes
from crust.host.block import devices, loopctl, users
from crust.host.files import locks, sparse
from crust.host.files.durable import AnyPath
from crust.host.process import syscalls

_ATTEMPTS = 1000


@dataclass(frozen=True, slots=True)
class LoopDevice:
    """A loop device at the time of the call. `direct_io` is the kernel's choice, not the request.

    `backing` is the file's present path, `file` its (device, inode). `tag` is the attacher's mark: losetup(8) leaves
    the path of that time. Without `is_whole` the device has an offset or a size limit.
    """

    path: str
    number: int
    backing: str
    file: tuple[int, int]
    tag: str
    identity: volumes.DeviceIdentity
    direct_io: bool
    readonly: bool
    is_whole: bool


class LoopAttachedDifferently(errors.Conflict):
    def __init__(self, backing: str, devices: tuple[LoopDevice, ...], why: str) -> None:
        paths = ", ".join(device.path for device in devices)
        super().__init__(f"{backing} is attached at {paths}", why=why)


def attach(
    backing: AnyPath, *, direct_io: bool = True, tag: str = "", once: bool = False
) -> LoopDevice:
    """Attach the file to a free loop device, with up to 63 bytes of `tag`, even if it is attached already.

    With `once` it has one device: the existing one, unchanged, or the new one; two processes that use `once` never
    attach twice. The kernel rounds the size down to a multiple of the sector. Without direct I/O on the backing
    filesystem the device is buffered, and `direct_io` of the result is false.

    Raises `NotFound`, `Refused`, `NoFreeLoopDevice`; with `once` also `LoopAttachPending` and
    `LoopAttachedDifferently` (read-only, a part of the file, more than one device).
    """
    with syscalls.translating(f"cannot open {backing}"):
        file = sparse.open_file(backing, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    with syscalls.closing(file), _locked(file, backing) if once else contextlib.nullcontext():
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise errors.InvalidRequest(
                f"{backing} cannot back a loop device", why="it is not a regular file"
            )
        if once and (devices := of_open_file(file)):
            why = ""
            if len(devices) > 1:
                why = "more than one device writes into one file"
            elif devices[0].readonly:
                why = "that device is read-only"
            elif not devices[0].is_whole:
                why = "that device has an offset or a size limit"
            if why:
                raise LoopAttachedDifferently(str(backing), devices, why)
            return devices[0]
        with syscalls.translating(f"cannot attach {backing} to a loop device"):
            number, fd = configure(file, loopctl.DIRECT_IO * direct_io, tag or str(backing))
            with syscalls.closing(fd):
                return _describe(number, loopctl.status(fd))


@contextmanager
def _locked(file: int, backing: AnyPath) -> Iterator[None]:
    if not locks.try_lock(file):
        raise errors.OperationPending.named(
            "LoopAttachPending", f"{backing} is being attached by another process"
        )
    try:
        yield
    finally:
        locks.unlock(file)


def refresh_size(device: LoopDevice) -> None:
    """Make the device as large as its file now is (LOOP_SET_CAPACITY): growing the file does not change it."""
    with syscalls.opened(device.path, f"cannot resize {device.path}") as fd:
        if not _is_same(device, fd):
            raise errors.NotFound(f"{device.path} is no longer attached to {device.backing}")
        fcntl.ioctl(fd, loopctl.SET_CAPACITY)


def keep_blocks(device: LoopDevice) -> None:
    """Have the device free no block of its file: it refuses a discard, and writes zeros where it would unmap."""
    with syscalls.opened(device.path, f"cannot keep the blocks of {device.backing}") as fd:
        if not _is_same(device, fd):
            raise errors.NotFound(f"{device.path} is no longer attached to {device.backing}")
        if loopctl.frees_blocks(device.number):
            loopctl.keep_blocks(device.number)


def detach(device: LoopDevice) -> None:
    """Detach the device and verify it; a detached one, or a reused number, is a success. The number of one that kept
    its blocks is removed: its next user would have no discards.

    Raises `DeviceInUse` when it is mounted or open anywhere; it then stays attached, unchanged.
    """
    if not is_attached(device):
        # Before the open: on a reused number the exclusive open would make the new owner's mount or mkfs fail for
        # a moment.
        return
    with syscalls.translating(f"cannot detach {device.path}"):
        try:
            # Refused while the device is mounted or held with O_EXCL, before anything has changed.
            fd = devices.open_exclusive(device.path)
        except errors.CrustError:
            if is_attached(device):
                raise
            return
        # While this descriptor is open the kernel gives the number to no other file, so the comparison holds.
        keeps_blocks = False
        with syscalls.closing(fd):
            if _is_same(device, fd):
                keeps_blocks = not loopctl.frees_blocks(device.number)
                loopctl.make_writable(fd)  # the next user of the number may not check
                fcntl.ioctl(fd, loopctl.CLEAR)
        # another opener of the device: udev's probe ends in a moment; a longer one is an error
        if is_attached(device) and not loopctl.wait_until(lambda: not is_attached(device)):
            # undo the refused clear: the kernel would detach the device at its holder's last close
            with (
                contextlib.suppress(FileNotFoundError, errors.NotFound),
                syscalls.closing(os.open(device.path, os.O_RDONLY)) as fd,
            ):
                if _is_same(device, fd):
                    loopctl.set_flags(fd, loopctl.status(fd).flags & ~loopctl.AUTOCLEAR)
            raise users.in_use(device.path)
        if keeps_blocks:
            loopctl.remove(device.number)


def find(backing: AnyPath) -> tuple[LoopDevice, ...]:
    """The loop devices of a file, found by (device, inode). An absent file has none."""
    with syscalls.translating(f"cannot stat {backing}"):
        try:
            fd = os.open(backing, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return ()
    with syscalls.closing(fd):
        return of_open_file(fd)


def list_named(matches: Callable[[str], bool]) -> tuple[LoopDevice, ...]:
    """The attached devices whose file's name, or last name before its removal, matches. Opens no other device.

    In the order of numbers; `backing` of a removed file ends in " (deleted)".
    """
    with syscalls.translating("cannot list the loop devices"):
        named = [(number, _name_of(number)) for number in loopctl.attached_numbers()]
        matching = [number for number, name in named if name is not None and matches(name)]
    return tuple(_described(matching))


def of_open_file(fd: int) -> tuple[LoopDevice, ...]:
    """The devices with a size, and so the writers, of an open file."""
    with syscalls.translating("cannot list the loop devices"):
        status, name = os.fstat(fd), _last_part(os.readlink(f"/proc/self/fd/{fd}"))
        numbers = loopctl.attached_numbers()
        if status.st_nlink <= 1:
            numbers = [number for number in numbers if _name_of(number) == name]
    file = status.st_dev, status.st_ino
    return tuple(device for device in _described(numbers) if device.file == file)


def is_attached(device: LoopDevice) -> bool:
    """Whether the device is attached, without an open, which would keep it attached."""
    number = device.number
    try:
        return loopctl.is_bound(number) and loopctl.identity(number) == device.identity
    except FileNotFoundError:
        return False  # the number itself was removed


def configure(backing_fd: int, flags: int, name: str) -> tuple[int, int]:
    """Attach an open file to a free number; returns that, and an open descriptor of the device. Raises `OSError`."""
    config = loopctl.configuration(backing_fd, flags, name)
    for _ in range(_ATTEMPTS):
        with syscalls.closing(os.open("/dev/loop-control", os.O_RDWR)) as control:
            # a number that is free; the kernel makes one when all are taken
            number, fd = fcntl.ioctl(control, loopctl.CTL_GET_FREE), -1
        try:
            if not loopctl.frees_blocks(number):  # a process was killed after it had detached it
                loopctl.remove(number)
            fd = os.open(loopctl.ensure_node(number), os.O_RDWR | os.O_CLOEXEC)
            fcntl.ioctl(fd, loopctl.CONFIGURE, config)
            loopctl.make_writable(fd)
        except OSError as err:
            if fd >= 0:
                os.close(fd)
            # After "number is free" another caller took it (EBUSY), or removed it (ENXIO, ENOENT).
            if err.errno not in (errno.EBUSY, errno.ENXIO, errno.ENOENT):
                raise
        else:
            return number, fd
    raise errors.Exhausted.named(
        "NoFreeLoopDevice",
        f"no loop device for {name}",
        why=f"other processes took the free device {_ATTEMPTS} times",
    )


def _is_same(device: LoopDevice, fd: int) -> bool:
    try:
        loopctl.status(fd)
        return loopctl.identity(device.number) == device.identity
    except OSError as err:
        if err.errno == errno.ENXIO:
            return False
        raise


def _describe(number: int, status: loopctl.Status) -> LoopDevice:
    return LoopDevice(
        path=loopctl.ensure_node(number),
        number=number,
        backing=loopctl.backing_file(number),
        file=(status.device, status.inode),
        tag=status.name,
        identity=loopctl.identity(number),
        direct_io=bool(status.flags & loopctl.DIRECT_IO),
        readonly=bool(status.flags & loopctl.READ_ONLY),
        is_whole=status.is_whole,
    )


def _name_of(number: int) -> str | None:
    """The name of a device's file, or its last one; None if the device is detached, or the path too long."""
    try:
        return _last_part(loopctl.backing_file(number))
    except OSError as err:
        if err.errno not in (errno.ENOENT, errno.ENODEV, errno.ENAMETOOLONG):
            raise
        return None


def _last_part(path: str) -> str:
    return os.path.basename(path).removesuffix(" (deleted)")


def _described(numbers: Iterable[int]) -> Iterator[LoopDevice]:
    with syscalls.translating("cannot list the loop devices"):
        for number in numbers:
            try:
                with syscalls.closing(os.open(loopctl.ensure_node(number), os.O_RDONLY)) as fd:
                    yield _describe(number, loopctl.status(fd))
            except (FileNotFoundError, errors.NotFound):
                continue  # detached meanwhile
            except OSError as err:
                if err.errno != errno.ENXIO:
                    raise
