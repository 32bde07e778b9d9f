"""System calls that Python does not wrap, each a function that raises OSError.

Numbers are those of x86_64 (arch/x86/entry/syscalls/syscall_64.tbl) and of include/uapi/linux/{mount,openat2,
fs}.h. No dataclasses here or elsewhere in the agent: importing them costs a tenth of the boot when the
processor is emulated.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_SYS_FINIT_MODULE = 313
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432
_SYS_OPENAT2 = 437
_SYS_MOUNT_SETATTR = 442

AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_AT_SYMLINK_NOFOLLOW = 0x100
_OPEN_TREE_CLONE = 1
_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOVE_MOUNT_T_EMPTY_PATH = 0x40
_FSCONFIG_SET_FLAG = 0
_FSCONFIG_SET_STRING = 1
_FSCONFIG_CMD_CREATE = 6

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_STRICTATIME = 0x20
MOUNT_ATTR_NODIRATIME = 0x80

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000

_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_RB_POWER_OFF = 0x4321FEDC


def mount(source: str, target: str, fstype: str, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    args = (source.encode(), target.encode(), fstype.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*args), target)


def unmount(target: str, flags: int = UMOUNT_NOFOLLOW) -> None:
    """umount2(2)."""
    _check(_libc.umount2(target.encode(), flags), target)


def sync_filesystem(fd: int) -> None:
    """syncfs(2)."""
    _check(_libc.syncfs(fd), f"descriptor {fd}")


def open_beneath(directory: int, path: str, flags: int, resolve: int) -> int:
    """openat2(2) under `directory`; EXDEV means that the path leads out of it, ELOOP a refused symlink."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, resolve)
    return _syscall(_SYS_OPENAT2, directory, path.encode(), how, len(how), name=path)


def clone_mount(fd: int) -> int:
    """A detached bind mount of the file of `fd`, as a descriptor (open_tree(2))."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_EMPTY_PATH
    return _syscall(_SYS_OPEN_TREE, fd, b"", flags)


def attach_mount(mount_fd: int, target_fd: int) -> None:
    """Attach a detached mount at the file of `target_fd`, without a look at its path (move_mount(2))."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
    _syscall(_SYS_MOVE_MOUNT, mount_fd, b"", target_fd, b"", flags)


def set_mount_attributes(mount_fd: int, attributes: int) -> None:
    """mount_setattr(2) on a mount and those below it."""
    attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    _syscall(_SYS_MOUNT_SETATTR, mount_fd, b"", flags, attr, len(attr))


def chown_entry(fd: int, uid: int, gid: int) -> None:
    """fchownat(2) of the very object of an O_PATH descriptor, a symbolic link included."""
    flags = _AT_EMPTY_PATH | _AT_SYMLINK_NOFOLLOW
    _check(_libc.fchownat(fd, b"", uid, gid, flags), f"descriptor {fd}")


def load_module(path: str) -> None:
    """finit_module(2); a module that is loaded already, or is for another processor (ENODEV), is success."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _syscall(_SYS_FINIT_MODULE, fd, b"", 0, name=path)
    except OSError as err:
        if err.errno not in (errno.EEXIST, errno.ENODEV):
            raise
    finally:
        os.close(fd)


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def set_namespace(fd: int, kind: int) -> None:
    """setns(2)."""
    _check(_libc.setns(fd, kind), "setns")


def drop_capability(number: int) -> None:
    """Remove a capability from the bounding set (capabilities(7)); execve then drops it from root too."""
    _check(_libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0), f"capability {number}")


def forbid_new_privileges() -> None:
    """PR_SET_NO_NEW_PRIVS."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def power_off() -> None:
    """reboot(2) with RB_POWER_OFF; does not return."""
    _check(_libc.reboot(_RB_POWER_OFF), "reboot")


class FilesystemContext:
    """A filesystem about to be mounted (fsopen(2)); its log says why the kernel refuses, where errno cannot."""

    def __init__(self, fstype: str) -> None:
        self._fd = _syscall(_SYS_FSOPEN, fstype.encode(), 1, name=fstype)

    def set_string(self, key: str, value: str) -> None:
        """Set a parameter that has a value."""
        self._configure(_FSCONFIG_SET_STRING, key.encode(), value.encode())

    def set_flag(self, key: str) -> None:
        """Set a parameter that has none."""
        self._configure(_FSCONFIG_SET_FLAG, key.encode(), None)

    def create(self, attributes: int) -> int:
        """Read the superblock and return a detached mount."""
        self._configure(_FSCONFIG_CMD_CREATE, None, None)
        return _syscall(_SYS_FSMOUNT, self._fd, 1, attributes)

    def complaints(self) -> str:
        """The messages in the filesystem's log, in one line."""
        lines: list[str] = []
        try:
            while len(lines) < 16:
                lines.append(os.read(self._fd, 1024).decode(errors="replace").strip()[2:])
        except OSError as err:
            if err.errno != errno.ENODATA:
                raise
        return "; ".join(lines)

    def close(self) -> None:
        """Release the context."""
        os.close(self._fd)

    def _configure(self, command: int, key: bytes | None, value: bytes | None) -> None:
        _syscall(_SYS_FSCONFIG, self._fd, command, key, value, 0)


def _syscall(number: int, *args: object, name: str = "") -> int:
    return _check(int(_libc.syscall(number, *map(_word, args))), name)


def _word(value: object) -> object:
    """Integers travel as 64 bits: ctypes would pass a negative one as 32."""
    return ctypes.c_long(value) if isinstance(value, int) else value


def _check(result: int, name: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return result
