"""A filesystem mounted at no path, for as long as a descriptor of its root is open.

For what only a mounted filesystem does: replay its log, or be thawed when its own mounts no longer exist. The kernel
parses what is on the device, so this must never be used for bytes that a guest wrote.
"""

import errno
import os

from crust.host.block import holders
from crust.host.process import oserrors, syscalls


def open_root(device: str, fs_type: str) -> int:
    """A descriptor of the root directory; when it is closed, the filesystem is unmounted. Raises `DeviceInUse`."""
    with oserrors.translating(f"cannot mount {device} as {fs_type} at no path"):
        context = syscalls.fsopen(fs_type)
        try:
            mount = _create(context, device)
        finally:
            os.close(context)
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
