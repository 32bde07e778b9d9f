"""Freezing a mounted filesystem (FIFREEZE): all is on disk, and nobody writes until it is thawed.

A freeze outlives the process that made it, even the descriptor: whoever freezes writes down that it will, first,
and thaws after a restart. So `thaw` of what is not frozen is fine.

Nor does an unmount thaw: the filesystem lives on, frozen, with the device open and no path that leads to it. Another
mount of the device is a way back to that very filesystem (`thaw_unmounted`).
"""

import errno
import fcntl
import os

from crust import errors
from crust.host.mounts import detached_mount
from crust.host.process import oserrors

_FIFREEZE = 0xC0045877
_FITHAW = 0xC0045878


class AlreadyFrozen(errors.NotReady):
    """A filesystem is frozen, perhaps by somebody else, who counts on it."""

    def __init__(self, mountpoint: str) -> None:
        super().__init__(
            f"{mountpoint} is frozen already", hint="wait for who froze it, or thaw it"
        )
        self.mountpoint = mountpoint


class Freeze:
    """A filesystem that is frozen from here on. It is thawed by the descriptor that froze it.

    So a thaw cannot fail for want of a descriptor, nor act on what was mounted over it meanwhile.
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
        """Let writers go on. Once."""
        with oserrors.translating(f"cannot thaw {self._mountpoint}"):
            try:
                fcntl.ioctl(self._fd, _FITHAW, 0)
            except OSError as err:
                if err.errno != errno.EINVAL:  # somebody else was faster
                    raise
            finally:
                os.close(self._fd)


def freeze(mountpoint: str) -> None:
    """Flush and freeze, and leave it so; raises `AlreadyFrozen`."""
    try:
        _ioctl(mountpoint, _FIFREEZE)
    except OSError as err:
        if err.errno == errno.EBUSY:
            raise AlreadyFrozen(mountpoint) from err
        raise oserrors.translate(err, f"cannot freeze {mountpoint}") from err


def thaw(mountpoint: str) -> None:
    """Let writers go on; not frozen is fine."""
    try:
        _ioctl(mountpoint, _FITHAW)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise oserrors.translate(err, f"cannot thaw {mountpoint}") from err


def thaw_unmounted(device: str, fs_type: str) -> None:
    """Thaw a filesystem that is mounted nowhere; not frozen is fine. Nobody sees the mount that it takes.

    Only for a device that something has open exclusively: else there is no such filesystem, and this would be its
    first mount. Raises `DeviceInUse` if what has it is no filesystem.
    """
    with oserrors.translating(f"cannot thaw the {fs_type} on {device}"):
        root = detached_mount.open_root(device, fs_type)
        try:
            fcntl.ioctl(root, _FITHAW, 0)
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
        finally:
            os.close(root)


def _ioctl(mountpoint: str, request: int) -> None:
    fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, request, 0)
    finally:
        os.close(fd)
