"""System calls that Python 3.11 has no name for, attributes of sysfs and procfs, and one table from errno to error.

The calls go through the C library and raise `OSError` like those of `os`. The numbers from 424 on are the same on
every architecture but alpha (include/uapi/asm-generic/unistd.h). ctypes releases the interpreter's lock during the
call, so a slow mount stops no other thread.

An errno alone decides no status code that a CO acts on. A missing /dev/loop-control does not mean that the volume
does not exist, a pool that is mounted read-only does not mean that the caller may not, and a process without
descriptors does not mean that the node is full. Such errors keep a class that code inside crust can catch (NotFound,
Refused), and a caller outside gets a failure of this process. A call site that knows which CSI object is meant raises
its own error. Where the errno means what it says, the branch gives the code: no space, busy, damaged. EINVAL mostly
answers a mistake of crust, so it is no InvalidRequest.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from crust.core import errors


class FileMissing(errors.NotFound):
    answered_as = errors.RuntimeFailed


class FileInTheWay(errors.Conflict):
    answered_as = errors.RuntimeFailed


class DeniedByKernel(errors.Refused):
    answered_as = errors.RuntimeFailed


class UnsupportedByKernel(errors.Unsupported):
    answered_as = errors.RuntimeFailed


class NameTooLongForKernel(errors.InvalidRequest):
    answered_as = errors.RuntimeFailed


class ProcessOutOfResources(errors.Exhausted):
    answered_as = errors.PeerUnavailable


_ERRORS: dict[int, type[errors.CrustError]] = {
    errno.ENOENT: FileMissing,
    errno.ESRCH: FileMissing,
    errno.EEXIST: FileInTheWay,
    errno.ENOTDIR: FileInTheWay,
    errno.EISDIR: FileInTheWay,
    errno.EACCES: DeniedByKernel,
    errno.EPERM: DeniedByKernel,
    errno.EROFS: DeniedByKernel,
    errno.ELOOP: DeniedByKernel,
    errno.ENOSYS: UnsupportedByKernel,
    errno.EOPNOTSUPP: UnsupportedByKernel,
    errno.ENOTTY: UnsupportedByKernel,
    errno.ENAMETOOLONG: NameTooLongForKernel,
    errno.ENOMEM: ProcessOutOfResources,
    errno.EMFILE: ProcessOutOfResources,
    errno.ENFILE: ProcessOutOfResources,
    errno.EBUSY: errors.NotReady,
    errno.ETXTBSY: errors.NotReady,
    errno.ENOTEMPTY: errors.NotReady,
    errno.EAGAIN: errors.OperationPending,
    errno.ENOSPC: errors.Exhausted,
    errno.EDQUOT: errors.Exhausted,
    errno.EFBIG: errors.OutOfRange,
    errno.EUCLEAN: errors.Corrupt,
    errno.EBADMSG: errors.Corrupt,
}


def reason(err: OSError) -> str:
    """The text and the name of the errno: "No space left on device (ENOSPC), /a/b"."""
    if err.errno is None:
        return str(err)
    name = errno.errorcode.get(err.errno, str(err.errno))
    # the path of a `HeldPath` means nothing to people; the failed action names the real one
    is_known = isinstance(err.filename, str) and not err.filename.startswith("/proc/self/fd/")
    place = f", {err.filename}" if is_known else ""
    return f"{os.strerror(err.errno)} ({name}){place}"


def translate(err: OSError, what: str, *, hint: str = "") -> errors.CrustError:
    """The error of crust for `err`, with `err` as its cause. `what` is the action that failed."""
    kind = _ERRORS.get(err.errno or 0, errors.RuntimeFailed)
    error = kind(what, why=reason(err), hint=hint)
    error.__cause__ = err
    return error


@contextmanager
def translating(what: str, *, hint: str = "") -> Iterator[None]:
    """Raise the translation of any `OSError` of the block."""
    try:
        yield
    except OSError as error:
        raise translate(error, what, hint=hint) from error


AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000

_OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH = 0x04
MOVE_MOUNT_T_EMPTY_PATH = 0x40
_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1

FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6

MOUNT_ATTR_RDONLY = 0x01
MOUNT_ATTR_NOSUID = 0x02
MOUNT_ATTR_NODEV = 0x04
MOUNT_ATTR_NOEXEC = 0x08

UMOUNT_NOFOLLOW = 0x08

_AT_SYMLINK_NOFOLLOW = 0x100
_AT_NO_AUTOMOUNT = 0x800
_AS_IT_IS = _AT_SYMLINK_NOFOLLOW | _AT_NO_AUTOMOUNT
_AT_STATX_DONT_SYNC = 0x4000
_STATX_MNT_ID = 0x1000
_STATX_ATTR_MOUNT_ROOT = 0x2000

_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.ESRCH)
"""A file of sysfs or procfs does not exist, or its device or process has gone. Every other errno is no answer."""

_LIMIT_BYTES = 4096
"""An attribute of sysfs is at most one page, and is read in one go."""

_libc = ctypes.CDLL(None, use_errno=True)
_LONG, _TEXT = ctypes.c_long, ctypes.c_char_p


# struct open_how of openat2(2): flags, mode, resolve.
_BENEATH = struct.pack(
    "=3Q", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
)
# struct statx of statx(2), as far as crust reads it: attributes, mode, major and minor of st_rdev, mount id.
_STATX = struct.Struct("=8xQ12xH98xII8xQ104x")
# Made faster than by create_string_buffer: a look makes one for each descriptor.
_StatxBuffer = ctypes.c_char * _STATX.size


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close the descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened(
    path: str | os.PathLike[str], what: str, flags: int = os.O_RDONLY, *, hint: str = ""
) -> Iterator[int]:
    """A descriptor of the path, of a new file with mode 0600. An `OSError`, also of the block, as `translating`."""
    with translating(what, hint=hint), closing(os.open(path, flags, 0o600)) as descriptor:
        yield descriptor


def _raising(function: Callable[..., int]) -> Callable[..., int]:
    """A function of the C library that raises `OSError`."""

    def call(*arguments: object) -> int:
        result = function(*arguments)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    return call


def _declared(number: int, *types: type[Any]) -> Callable[..., int]:
    """A system call with arguments of these types; raises `OSError`.

    Every integer goes as a long, a full register: variadic syscall() reads longs. Types that are declared once cost
    less than a look at each argument of each call, of which a mount makes a dozen.
    """
    function = ctypes.CFUNCTYPE(_LONG, _LONG, *types, use_errno=True)(("syscall", _libc))
    return _raising(partial(function, number))


_statx = _raising(_libc.statx)
_umount2 = _raising(_libc.umount2)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
fallocate = _raising(_libc.fallocate)
"""fallocate(2): unlike posix_fallocate(3) it writes nothing where the filesystem cannot allocate."""
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
sync_file_range = _raising(_libc.sync_file_range)

_ioctl = _raising(_libc.ioctl)

_open_tree = _declared(428, _LONG, _TEXT, _LONG)
_move_mount = _declared(429, _LONG, _TEXT, _LONG, _TEXT, _LONG)
_fsopen = _declared(430, _TEXT, _LONG)
_fsconfig = _declared(431, _LONG, _LONG, _TEXT, _TEXT, _LONG)
_fsmount = _declared(432, _LONG, _LONG, _LONG)
_openat2 = _declared(437, _LONG, _TEXT, ctypes.c_void_p, _LONG)
_pidfd_getfd = _declared(438, _LONG, _LONG, _LONG)


def call(number: int, *arguments: int | bytes) -> int:
    """A system call whose number depends on the architecture."""
    types = [ctypes.c_char_p if isinstance(argument, bytes) else _LONG for argument in arguments]
    return _declared(number, *types)(*arguments)


def ioctl(descriptor: int, request: int, changed: bytearray) -> None:
    """ioctl(2) with a buffer of any size that the kernel changes.

    fcntl.ioctl keeps the interpreter's lock where the buffer has more than 1,024 bytes: all other calls would wait.
    """
    buffer = (ctypes.c_char * len(changed)).from_buffer(changed)
    _ioctl(descriptor, ctypes.c_ulong(request), buffer)


def fsopen(fs_type: str) -> int:
    """A descriptor of a filesystem context, fsopen(2)."""
    return _fsopen(os.fsencode(fs_type), _FSOPEN_CLOEXEC)


def fsconfig(context: int, command: int, key: str | None = None, value: str | None = None) -> None:
    """Set a parameter of a context, or act on it, fsconfig(2)."""
    coded_key = None if key is None else os.fsencode(key)
    coded_value = None if value is None else os.fsencode(value)
    _fsconfig(context, command, coded_key, coded_value, 0)


def fsmount(context: int, attributes: int) -> int:
    """A descriptor of a detached mount of the context's filesystem, fsmount(2)."""
    return _fsmount(context, _FSMOUNT_CLOEXEC, attributes)


def open_beneath(directory: int, path: str) -> int:
    """openat2(2): an O_PATH descriptor of a directory below another one, by no symbolic link and by no "..".

    `OSError` does not say which component it was.
    """
    return _openat2(directory, os.fsencode(path), _BENEATH, len(_BENEATH))


def copy_descriptor(process: int, number: int) -> int:
    """A copy of descriptor `number` of the process of a pidfd, pidfd_getfd(2); closed on exec."""
    return _pidfd_getfd(process, number, 0)


def open_tree(path: str) -> int:
    """A descriptor of a detached copy of a mount, open_tree(2)."""
    return _open_tree(AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | os.O_CLOEXEC)


def move_mount(mount: int, target: int) -> None:
    """Attach a detached mount onto the file of the descriptor `target`, move_mount(2)."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    _move_mount(mount, b"", target, b"", flags)


class MountAt(NamedTuple):
    """The mount that a path lies on, and whether the path leads to its root."""

    mount_id: int
    is_root: bool


def mount_at(path: str, *, directory: int = AT_FDCWD) -> MountAt:
    """The mount that `path` lies on, statx(2).

    The kernel follows no link at the end and asks no file server. An empty path means the descriptor `directory`.
    """
    flags = (_AS_IT_IS if path else AT_EMPTY_PATH) | _AT_STATX_DONT_SYNC
    status = _StatxBuffer()
    _statx(directory, os.fsencode(path), flags, _STATX_MNT_ID, status)
    attributes, _, _, _, mount_id = _STATX.unpack(status)
    return MountAt(mount_id, bool(attributes & _STATX_ATTR_MOUNT_ROOT))


def block_device_at(path: str) -> int | None:
    """The number (st_rdev) of the block device that `path` leads to, statx(2); None if it is none.

    Unlike stat(2), it does not wait for a file server that hangs. It asks for no field: a FUSE mount of another user
    refuses root a field, and the filesystems of devices give the type anyway.
    """
    status = _StatxBuffer()
    _statx(AT_FDCWD, os.fsencode(path), _AT_STATX_DONT_SYNC, 0, status)
    _, mode, major, minor, _ = _STATX.unpack(status)
    return os.makedev(major, minor) if stat.S_ISBLK(mode) else None


def umount(path: str) -> None:
    """umount2(2) of the topmost mount at `path`, never through a symbolic link at its end."""
    _umount2(os.fsencode(path), UMOUNT_NOFOLLOW)


def read_attribute(path: str) -> str:
    """An attribute of sysfs or procfs without its line end; names of files in it may hold any byte. Raises `OSError`.

    Three system calls, where a text file of Python takes ten.
    """
    with closing(os.open(path, os.O_RDONLY)) as fd:
        return os.fsdecode(os.read(fd, _LIMIT_BYTES)).removesuffix("\n")


def known_attribute(path: str) -> str:
    """The attribute as `read_attribute` gives it; empty if it, or its device, does not exist. Raises `OSError`."""
    try:
        return read_attribute(path)
    except OSError as err:
        if err.errno not in ABSENT:
            raise
        return ""


def names_in(directory: str) -> list[str]:
    """The names in a directory; none if it, or its device or process, does not exist. Raises `OSError`."""
    try:
        return os.listdir(directory)
    except OSError as err:
        if err.errno not in ABSENT:
            raise
        return []


def read_whole(path: str) -> bytes:
    """A whole file, however long: procfs and cgroupfs have no limit. Raises `OSError`."""
    with closing(os.open(path, os.O_RDONLY)) as fd:
        parts = [os.read(fd, _LIMIT_BYTES)]
        while parts[-1]:
            parts.append(os.read(fd, _LIMIT_BYTES))
    return b"".join(parts)


def write_attribute(path: str, data: bytes) -> None:
    """Write an attribute in one call. Raises `OSError`."""
    with closing(os.open(path, os.O_WRONLY)) as fd:
        os.write(fd, data)


def boot_id() -> str:
    """The kernel's random id of this boot (random(4)): a record with another one is from before a reboot."""
    with translating("cannot read the boot id"):
        return read_attribute("/proc/sys/kernel/random/boot_id")
