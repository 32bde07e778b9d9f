"""Freezing a mounted filesystem (FIFREEZE): all data is on the disk, and writers wait until it is thawed.

A freeze outlives the process and the descriptor that made it: the caller records its intent first, and thaws after a
restart. So `thaw` of a filesystem that is not frozen is a success.

An unmount does not thaw either: the filesystem stays frozen, with the device open and no path that leads to it.
Another mount of the device reaches that filesystem again (`thaw_unmounted`).

A filesystem mounted at no path, for as long as a descriptor of its root is open.

For what only a mounted filesystem does: replay its log, or be thawed when its own mounts no longer exist. The kernel
parses what is on the device, so this must never be used for bytes that a guest wrote.
"""

import errno
import fcntl
import os

from crust.core import errors
from crust.host.block import holders
from crust.host.process import oserrors, syscalls

_FIFREEZE = 0xC0045877
_FITHAW = 0xC0045878


class AlreadyFrozen(errors.NotReady):
    """A filesystem is frozen already, perhaps by another program that relies on it."""

    def __init__(self, mountpoint: str) -> None:
        super().__init__(
            f"{mountpoint} is frozen already",
            hint="wait until that program thaws it, or thaw it with fsfreeze -u",
        )
        self.mountpoint = mountpoint


class Freeze:
    """A filesystem that is frozen until `thaw`, by the descriptor that froze it.

    So a thaw cannot fail for lack of a descriptor, nor act on another filesystem that was mounted over it.
    """

    def __init__(self, mountpoint: str) -> None:
        """Flush and freeze; raises `AlreadyFrozen`."""
        self._mountpoint = mountpoint
        with oserrors.translating(f"cannot freeze {mountpoint}"):
            self._fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(self._fd, _FIFREEZE, 0)
            except OSError as err:
                os.close(self._fd)
                if err.errno == errno.EBUSY:
                    raise AlreadyFrozen(mountpoint) from err
                raise

    def thaw(self) -> None:
        """Let writers continue. Call it once."""
        with oserrors.translating(f"cannot thaw {self._mountpoint}"):
            try:
                fcntl.ioctl(self._fd, _FITHAW, 0)
            except OSError as err:
                if err.errno != errno.EINVAL:  # thawed by another program
                    raise
            finally:
                os.close(self._fd)


def freeze(mountpoint: str) -> None:
    """Flush and freeze; it stays frozen when this process ends. Raises `AlreadyFrozen`."""
    try:
        _ioctl(mountpoint, _FIFREEZE)
    except OSError as err:
        if err.errno == errno.EBUSY:
            raise AlreadyFrozen(mountpoint) from err
        raise oserrors.translate(err, f"cannot freeze {mountpoint}") from err


def thaw(mountpoint: str) -> None:
    """Let writers continue; not frozen is a success."""
    try:
        _ioctl(mountpoint, _FITHAW)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise oserrors.translate(err, f"cannot thaw {mountpoint}") from err


def thaw_unmounted(device: str, fs_type: str) -> None:
    """Thaw a filesystem that has no mount, by a mount at no path; not frozen is a success.

    Only for a device that is held exclusively: otherwise no such filesystem exists, and this would be its first
    mount. Raises `DeviceInUse` if the holder is not a filesystem.
    """
    with oserrors.translating(f"cannot thaw the {fs_type} on {device}"):
        root = open_root(device, fs_type)
        try:
            fcntl.ioctl(root, _FITHAW, 0)
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
        finally:
            os.close(root)


def _ioctl(mountpoint: str, request: int) -> None:
    with syscalls.closing(os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        fcntl.ioctl(fd, request, 0)


def open_root(device: str, fs_type: str) -> int:
    """A descriptor of the root directory; when it is closed, the filesystem is unmounted. Raises `DeviceInUse`."""
    with oserrors.translating(f"cannot mount {device} as {fs_type} at no path"):
        with syscalls.closing(syscalls.fsopen(fs_type)) as context:
            mount = _create(context, device)
        try:
            # The mount's own descriptor is an O_PATH one, which takes no ioctl.
            path = f"/proc/self/fd/{mount}"
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            os.close(mount)


def _create(context: int, device: str) -> int:
    syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, "source", device)
    try:
        syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE)
    except OSError as err:
        if err.errno == errno.EBUSY:
            raise holders.device_in_use(device) from err
        raise
    return syscalls.fsmount(context, 0)
