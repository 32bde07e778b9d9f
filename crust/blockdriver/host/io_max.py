"""io.max of control groups v2: one line per device for a group and all groups below it together.

Writes through the page cache count too: the kernel knows whose pages it writes back. One write(2) changes all four
numbers, so there is no moment with some of them. Source: Linux Documentation/admin-guide/cgroup-v2.rst, IO.
"""

import errno
import os

from crust.core import volumes
from crust.host.files import listing
from crust.host.process import syscalls

_FILE = "io.max"
_KEYS = {
    "rbps": "read_bytes_per_second",
    "wbps": "write_bytes_per_second",
    "riops": "read_iops",
    "wiops": "write_iops",
}
_NO_LIMIT = "max"
_IOPS_MAX = 2**32 - 1  # the kernel's maximum; it truncates larger numbers without an error


class IoMax:
    """The limits of the first of `groups` that is below `root`."""

    def __init__(self, root: str, groups: tuple[str, ...]) -> None:
        self._root = root
        self._groups = groups

    def obstacle(self) -> str:
        """The reason why limits cannot be set, for messages; empty if they can. Raises `OSError`."""
        group = self._group()
        if group is None:
            return f"there is no {' or '.join(self._groups)} in {self._root}"
        if os.path.samefile(group, self._root):
            return f"{group} is the root group, which cannot be limited"
        path = os.path.join(group, _FILE)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        except OSError as err:
            if err.errno not in (errno.ENOENT, errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            todo = f"write +io to {os.path.dirname(group)}/cgroup.subtree_control"
            return f"{path} cannot be written ({os.strerror(err.errno)}); if it is missing, {todo}"
        return ""

    def get(self, device: volumes.DeviceIdentity) -> volumes.IoLimits:
        """The device's limits; none without a group or a line."""
        group = self._group()
        try:
            path = None if group is None else os.path.join(group, _FILE)
            text = "" if path is None else syscalls.read_whole(path).decode("ascii")
        except FileNotFoundError:
            return volumes.IoLimits()
        return parse(text, device)

    def set(self, device: volumes.DeviceIdentity, limits: volumes.IoLimits) -> None:
        """Write the line if it differs; a removed device has no line to remove."""
        group = self._group()
        if group is None or self.get(device) == limits:
            return
        try:
            path = os.path.join(group, _FILE)
            syscalls.write_attribute(path, line(device, limits).encode())
        except OSError as err:
            if err.errno != errno.ENODEV or limits != volumes.IoLimits():
                raise

    def _group(self) -> str | None:
        paths = (os.path.join(self._root, group).rstrip("/") for group in self._groups)
        return next(filter(listing.exists, paths), None)


def parse(text: str, device: volumes.DeviceIdentity) -> volumes.IoLimits:
    """A device's limits in the text of an io.max file."""
    for splitline in text.splitlines():
        name, *words = splitline.split()
        if name == f"{device.major}:{device.minor}":
            pairs = (word.partition("=") for word in words)
            limits = {key: value for key, _, value in pairs if key in _KEYS and value != _NO_LIMIT}
            return volumes.IoLimits(**{_KEYS[key]: int(value) for key, value in limits.items()})
    return volumes.IoLimits()


def line(device: volumes.DeviceIdentity, limits: volumes.IoLimits) -> str:
    """The line for io.max; it names every number, so that nothing of an earlier line stays."""
    words = [f"{key}={_number(key, getattr(limits, name))}" for key, name in _KEYS.items()]
    return f"{device.major}:{device.minor} {' '.join(words)}\n"


def _number(key: str, value: int) -> str:
    if value == 0:
        return _NO_LIMIT
    return str(min(value, _IOPS_MAX) if key.endswith("iops") else value)
