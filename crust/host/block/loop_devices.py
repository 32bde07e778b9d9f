"""Which loop devices there are, and of which files.

Devices are matched with files by (device, inode), never by name: names are cut at 63 bytes and go stale. The name
that the kernel keeps is the attacher's own mark, a `tag`: it is still there when the file is not.

But both are known only to who opens the device and asks, and the kernel then asks the filesystem of the backing file:
with one file server that hangs, a search would. So a search goes by the last part of the backing file's present path
first, which sysfs tells without the file, and opens only devices whose file has the name. A file that root bound over
one of another name is not found; of a file with several names any device may be, and each is opened.

A loop number is reused at once: whoever acts on a device compares its disk sequence (`is_same`) first.
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crust.core import errors, volumes
from crust.host.block import loopctl
from crust.host.files.held_directory import AnyPath
from crust.host.process import oserrors, syscalls

_DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class LoopDevice:
    """A loop device at the time of the call. `direct_io` is what the kernel granted, not what was asked for.

    `backing` is the file's present path, `file` its (device, inode). `tag` is the attacher's mark: losetup(8) leaves
    the path of then. A device that is not `is_whole` has an offset or a size limit.
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


def find(backing: AnyPath) -> tuple[LoopDevice, ...]:
    """The loop devices of a file, found by (device, inode). An absent file has none."""
    with oserrors.translating(f"cannot stat {backing}"):
        try:
            fd = os.open(backing, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return ()
    try:
        return of_open_file(fd)
    finally:
        os.close(fd)


def list_all() -> tuple[LoopDevice, ...]:
    """Every attached loop device, by number; `backing` of a removed file ends in " (deleted)". Opens each."""
    return list_named(lambda _: True)


def list_named(is_wanted: Callable[[str], bool]) -> tuple[LoopDevice, ...]:
    """The attached devices whose file's name is wanted, or was when the file was removed. Opens no other device."""
    names = _bound_names(bound())
    return tuple(_described(number for number, name in names if is_wanted(name)))


def bound() -> frozenset[int]:
    """The numbers of the attached loop devices. Opens none."""
    with oserrors.translating("cannot list the loop devices"):
        return frozenset(loopctl.bound_numbers())


def size_bytes(device: LoopDevice) -> int:
    """The device's size now; 0 when it is detached or its number was reused. Opens nothing."""
    with oserrors.translating(f"cannot stat {device.path}"):
        try:
            same = loopctl.identity(device.number) == device.identity
            return loopctl.size_bytes(device.number) if same else 0
        except FileNotFoundError:
            return 0  # the number itself was removed


def of_open_file(fd: int) -> tuple[LoopDevice, ...]:
    """The devices that write into an open file: one without a size does not."""
    with oserrors.translating("cannot list the loop devices"):
        status, name = os.fstat(fd), _last_part(os.readlink(f"/proc/self/fd/{fd}"))
        numbers = loopctl.sized_numbers()
        if status.st_nlink <= 1:
            numbers = [each for each in numbers if _name_of(each) == name]
    file = status.st_dev, status.st_ino
    return tuple(each for each in _described(numbers) if each.file == file)


def is_attached(device: LoopDevice) -> bool:
    """Whether it is attached; not by opening it, because an open would keep it attached."""
    try:
        return (
            loopctl.is_bound(device.number) and loopctl.identity(device.number) == device.identity
        )
    except FileNotFoundError:
        return False  # the number itself was removed


def is_same(device: LoopDevice, fd: int) -> bool:
    try:
        loopctl.status(fd)
        return loopctl.identity(device.number) == device.identity
    except OSError as err:
        if err.errno == errno.ENXIO:
            return False
        raise


def describe(number: int, status: loopctl.Status) -> LoopDevice:
    return LoopDevice(
        path=loopctl.node(number),
        number=number,
        backing=loopctl.backing_file(number),
        file=(status.device, status.inode),
        tag=status.name,
        identity=loopctl.identity(number),
        direct_io=bool(status.flags & loopctl.DIRECT_IO),
        readonly=bool(status.flags & loopctl.READ_ONLY),
        is_whole=status.is_whole,
    )


@contextmanager
def opened(path: str, *, writable: bool = False) -> Iterator[int]:
    with syscalls.closing(os.open(path, (os.O_RDWR if writable else os.O_RDONLY))) as fd:
        yield fd


def _bound_names(among: Iterable[int]) -> Iterator[tuple[int, str]]:
    with oserrors.translating("cannot list the loop devices"):
        for number in sorted(among):
            name = _name_of(number)
            if name is not None:
                yield number, name


def _name_of(number: int) -> str | None:
    """The name of a device's file, or its last one; None if the device is detached, or the path too long."""
    try:
        return _last_part(loopctl.backing_file(number))
    except OSError as err:
        if err.errno not in (errno.ENOENT, errno.ENODEV, errno.ENAMETOOLONG):
            raise
        return None


def _last_part(path: str) -> str:
    return os.path.basename(path).removesuffix(_DELETED)


def _described(numbers: Iterable[int]) -> Iterator[LoopDevice]:
    with oserrors.translating("cannot list the loop devices"):
        for number in numbers:
            try:
                with opened(loopctl.node(number)) as fd:
                    yield describe(number, loopctl.status(fd))
            except (FileNotFoundError, errors.NotFound):
                continue  # detached meanwhile
            except OSError as err:
                if err.errno != errno.ENXIO:
                    raise
