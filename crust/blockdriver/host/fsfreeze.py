"""Freezing a mounted filesystem (FIFREEZE): all data is on the disk, and writers wait until it is thawed.

A freeze outlives the process and the descriptor that made it. So a process beside this one has the descriptor too,
and thaws when this one ends before its own thaw. Both may be killed at once, as a control group or container is: the
caller records its intent first, and thaws after a restart. So `thaw` of a filesystem that is not frozen is a success.

An unmount does not thaw either: the filesystem stays frozen, with the device open and no path that leads to it.
Another mount of the device, at no path, reaches that filesystem again (`thaw_unmounted`). The kernel then parses the
bytes of the device, so this must never be used where a guest wrote them.
"""

import errno
import fcntl
import os
import subprocess
import sys

from crust.core import errors
from crust.host.mounts import mount_api
from crust.host.process import syscalls

FIFREEZE = 0xC0045877
FITHAW = 0xC0045878

_WATCHDOG = f"""
import fcntl, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.read(0, 1)
fcntl.ioctl(int(sys.argv[1]), {FITHAW}, 0)
"""
"""Its standard input is a pipe that nobody writes: it ends when all that have the other end have ended."""


class Freeze:
    """A filesystem that is frozen until `thaw`, by its descriptor: a thaw reaches none that was mounted over it."""

    def __init__(self, mountpoint: str) -> None:
        """Flush and freeze; raises AlreadyFrozen."""
        self._mountpoint = mountpoint
        with syscalls.translating(f"cannot freeze {mountpoint}"):
            self._fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._watchdog = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(self._fd)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(self._fd,),
                )
            except OSError:
                os.close(self._fd)
                raise
            try:
                fcntl.ioctl(self._fd, FIFREEZE, 0)
            except OSError as err:
                self._close()
                if err.errno == errno.EBUSY:
                    raise errors.NotReady.named(
                        "AlreadyFrozen",
                        f"{mountpoint} is frozen already",
                        why="another program froze it, and may rely on it",
                    ) from err
                raise

    def thaw(self) -> bool:
        """Let writers continue; returns False if another program has let them before. Call it once."""
        with syscalls.translating(f"cannot thaw {self._mountpoint}"):
            try:
                return _thaw(self._fd)
            finally:
                self._close()

    def _close(self) -> None:
        with self._watchdog as watchdog:  # closes the pipe, and reaps it
            watchdog.kill()
        os.close(self._fd)


def thaw(mountpoint: str) -> None:
    """Let writers continue; not frozen is a success."""
    with syscalls.opened(mountpoint, f"cannot thaw {mountpoint}", os.O_DIRECTORY) as root:
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
