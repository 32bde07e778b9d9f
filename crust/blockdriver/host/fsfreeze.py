"""Freezing a mounted filesystem (FIFREEZE): all data is on the disk, and writers wait until it is thawed.

A freeze outlives the process and the descriptor that made it: the caller records its intent first, and thaws after a
restart. So `thaw` of a filesystem that is not frozen is a success.

An unmount does not thaw either: the filesystem stays frozen, with the device open and no path that leads to it.
Another mount of the device, at no path, reaches that filesystem again (`thaw_unmounted`). The kernel then parses the
bytes of the device, so this must never be used where a guest wrote them.
"""

import errno
import fcntl
import os

from crust.core import errors
from crust.host.mounts import mount_api
from crust.host.process import syscalls

FIFREEZE = 0xC0045877
FITHAW = 0xC0045878


class Freeze:
    """A filesystem that is frozen until `thaw`, by the descriptor that froze it.

    So a thaw needs no new descriptor, and cannot reach another filesystem that was mounted over it.
    """

    def __init__(self, mountpoint: str) -> None:
        """Flush and freeze; raises AlreadyFrozen."""
        self._mountpoint = mountpoint
        with syscalls.translating(f"cannot freeze {mountpoint}"):
            self._fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.ioctl(self._fd, FIFREEZE, 0)
            except OSError as err:
                os.close(self._fd)
                if err.errno == errno.EBUSY:
                    raise errors.NotReady.named(
                        "AlreadyFrozen",
                        f"{mountpoint} is frozen already",
                        why="another program froze it, and may rely on it",
                        hint="wait until that program thaws it, or thaw it with fsfreeze -u",
                    ) from err
                raise

    def thaw(self) -> bool:
        """Let writers continue; returns False if another program has let them before. Call it once."""
        with syscalls.translating(f"cannot thaw {self._mountpoint}"), syscalls.closing(self._fd):
            return _thaw(self._fd)


def thaw(mountpoint: str) -> None:
    """Let writers continue; not frozen is a success."""
    with (
        syscalls.translating(f"cannot thaw {mountpoint}"),
        syscalls.closing(os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)) as root,
    ):
        _thaw(root)


def thaw_unmounted(device: str, fs_type: str) -> None:
    """Thaw a filesystem that has no mount, by a mount at no path; not frozen is a success.

    Only for a device that is held exclusively: otherwise no such filesystem exists, and this would be its first
    mount. Raises `DeviceInUse` if the holder is not a filesystem.
    """
    with (
        syscalls.translating(f"cannot thaw the {fs_type} on {device}"),
        syscalls.closing(mount_api.open_root(device, fs_type)) as root,
    ):
        _thaw(root)


def _thaw(root: int) -> bool:
    """Whether it was frozen."""
    try:
        fcntl.ioctl(root, FITHAW, 0)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
        return False
    return True
