"""I/O limits of a block device, enforced by the kernel's control groups for one group and all groups below it.

A limit is a line of a group: this device, so many operations and bytes per second. The group holds all pods of the
node: a device belongs to one volume, and the volume has its limits for all its pods together. The group differs
between nodes, so it is a setting; the default is the kubelet's.

The kernel keeps a line when its loop device is detached, and the next file with that number inherits it: so crust
removes the lines at each attach and detach. A node that cannot limit (`check_can_limit`) refuses a volume with
limits.

Control groups v2 only (io.max): under v1 a line binds its own group and none below it, so it cannot limit all pods.
Writes through the page cache count too: the kernel knows whose pages it writes back. One write(2) changes all four
numbers, so there is no moment with some of them. Source: Linux Documentation/admin-guide/cgroup-v2.rst, IO.
"""

import errno
import os

from crust.core import errors, volumes
from crust.host.files import listing
from crust.host.mounts import mountinfo
from crust.host.process import syscalls

NONE = volumes.IoLimits()
_GONE = (errno.ENOENT, errno.ENODEV)
KUBELETS = ("kubepods.slice", "kubepods")
"""Where a kubelet keeps its pods, with systemd's control groups and without."""
_FILE = "io.max"
_KEYS = {
    "rbps": "read_bytes_per_second",
    "wbps": "write_bytes_per_second",
    "riops": "read_iops",
    "wiops": "write_iops",
}
_NO_LIMIT = "max"
_IOPS_MAX = 2**32 - 1  # the kernel's maximum; it truncates larger numbers without an error


class CannotThrottle(errors.NotReady):
    def __init__(self, why: str) -> None:
        super().__init__("I/O limits cannot be held on this node", why=why)


class Throttle:
    """Limits by device. Every method blocks, and may be called from several threads.

    `io_cgroup` is the path of a group in the hierarchy that has the io controller; empty: the one of a kubelet.
    """

    def __init__(self, io_cgroup: str = "") -> None:
        self._groups = (io_cgroup.strip("/"),) if io_cgroup else KUBELETS
        self._root = ""
        """Where the hierarchy is mounted; empty until one is found."""

    def look(self) -> None:
        """Find the hierarchy: once, before the first attach. A host may have several, one with the io controller."""
        with syscalls.translating("cannot look for control groups"):
            for mount in mountinfo.read_all():
                if mount.fs_type != "cgroup2":  # it is not looked at: it may hang
                    continue
                # none: covered by another mount, or gone
                controllers = syscalls.known_attribute(f"{mount.target}/cgroup.controllers")
                if "io" in controllers.split():
                    self._root = mount.target
                    return
        self._root = ""

    def check_can_limit(self) -> None:
        """Raise `CannotThrottle` if a limit could not be set now. Looks again for a hierarchy that was missing."""
        if not self._root:
            self.look()
        if not self._root:
            for mount in mountinfo.read_all():
                if mount.fs_type == "cgroup" and "blkio" in mount.super_options:
                    why = f"this host limits I/O by control groups v1 ({mount.target}); only v2 can limit all pods"
                    raise CannotThrottle(why)
            raise CannotThrottle("no control group hierarchy with the io controller is mounted")
        with syscalls.translating("cannot look for control groups"):
            group = self._group()
            if group is None:
                why = f"there is no {' or '.join(self._groups)} in {self._root}"
                raise CannotThrottle(why)
            if os.path.samefile(group, self._root):
                raise CannotThrottle(f"{group} is the root group, which cannot be limited")
            path = os.path.join(group, _FILE)
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
            except OSError as err:
                if err.errno not in (errno.ENOENT, errno.EROFS, errno.EACCES, errno.EPERM):
                    raise
                todo = f"write +io to {os.path.dirname(group)}/cgroup.subtree_control"
                reason = os.strerror(err.errno)
                why = f"{path} cannot be written ({reason}); if it is missing, {todo}"
                raise CannotThrottle(why) from err

    def limits_of(self, device: volumes.DeviceIdentity) -> volumes.IoLimits:
        """The kernel's limits for the device; none on a node that cannot limit."""
        with syscalls.translating(f"cannot read the I/O limits of {device}"):
            return _line_of(self._group(), device)

    def set(self, device: volumes.DeviceIdentity, limits: volumes.IoLimits) -> None:
        """Give the kernel these limits, and no others. Cheap if it has them; a removed device has none to remove, nor
        has a device of a node that never limited one. Raises `CannotThrottle`, unless `limits` is empty, and
        translated errors of the kernel; call it again then.
        """
        if limits != NONE:
            self.check_can_limit()
        try:
            group = self._group()
            if group is None or _line_of(group, device) == limits:
                return
            try:
                syscalls.write_attribute(os.path.join(group, _FILE), line(device, limits).encode())
            except OSError as err:
                if err.errno != errno.ENODEV or limits != NONE:
                    raise
        except OSError as err:
            if err.errno in _GONE:  # NOT_FOUND would mean that the volume does not exist
                raise CannotThrottle(f"{device}: {syscalls.reason(err)}") from err
            raise syscalls.translate(err, f"cannot set the I/O limits of {device}") from err

    def _group(self) -> str | None:
        paths = (os.path.join(self._root, group).rstrip("/") for group in self._groups)
        return next(filter(listing.exists, paths), None) if self._root else None


def _line_of(group: str | None, device: volumes.DeviceIdentity) -> volumes.IoLimits:
    if group is None:
        return NONE
    try:
        return parse(syscalls.read_whole(os.path.join(group, _FILE)).decode("ascii"), device)
    except FileNotFoundError:
        return NONE


def parse(text: str, device: volumes.DeviceIdentity) -> volumes.IoLimits:
    """A device's limits in the text of an io.max file."""
    for splitline in text.splitlines():
        name, *words = splitline.split()
        if name == f"{device.major}:{device.minor}":
            pairs = (word.partition("=") for word in words)
            limits = {key: value for key, _, value in pairs if key in _KEYS and value != _NO_LIMIT}
            return volumes.IoLimits(**{_KEYS[key]: int(value) for key, value in limits.items()})
    return NONE


def line(device: volumes.DeviceIdentity, limits: volumes.IoLimits) -> str:
    """The line for io.max; it names every number, so that nothing of an earlier line stays."""
    words = []
    for key, name in _KEYS.items():
        limit = getattr(limits, name)
        words.append(f"{key}={(min(limit, _IOPS_MAX) if 'iops' in key else limit) or _NO_LIMIT}")
    return f"{device.major}:{device.minor} {' '.join(words)}\n"
