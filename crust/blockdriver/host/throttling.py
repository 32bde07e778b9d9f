"""I/O limits of a block device, enforced by the kernel's control groups for one group and all groups below it.

A limit is a line of a group: this device, so many operations and bytes per second. The group holds all pods of the
node: a device belongs to one volume, and the volume has its limits for all its pods together. The group differs
between nodes, so it is a setting; the default is the kubelet's.

The kernel keeps a line when its loop device is detached, and the next file with that number inherits it: so crust
removes the lines at each attach and detach. A node that cannot limit (`check_can_limit`) refuses a volume with
limits.

Control groups v2 only (`io_max`): under v1 a line binds its own group and none below it, so it cannot limit all pods.
"""

import errno

from crust.blockdriver.host.io_max import IoMax
from crust.core import errors, volumes
from crust.host.mounts import mountinfo
from crust.host.process import syscalls

NONE = volumes.IoLimits()
_GONE = (errno.ENOENT, errno.ENODEV)
KUBELETS = ("kubepods.slice", "kubepods")
"""Where a kubelet keeps its pods, with systemd's control groups and without."""


class CannotThrottle(errors.NotReady):
    """This node has no control group through which the device could be limited."""

    def __init__(self, why: str) -> None:
        super().__init__("I/O limits cannot be held on this node", why=why)


class Throttle:
    """Limits by device. Every method blocks, and may be called from several threads.

    `io_cgroup` is the path of a group in the hierarchy that has the io controller; empty: the one of a kubelet.
    """

    def __init__(self, io_cgroup: str = "") -> None:
        self._groups = (io_cgroup.strip("/"),) if io_cgroup else KUBELETS
        self._hierarchy: IoMax | None = None

    def look(self) -> None:
        """Find the hierarchy: once, before the first device is attached."""
        with syscalls.translating("cannot look for control groups"):
            self._hierarchy = _hierarchy(self._groups)

    def check_can_limit(self) -> None:
        """Raise `CannotThrottle` if a limit could not be set now. Looks again for a hierarchy that was missing."""
        if self._hierarchy is None:
            self.look()
        if self._hierarchy is None:
            for mount in mountinfo.read_all():
                if mount.fs_type == "cgroup" and "blkio" in mount.super_options:
                    why = f"this host limits I/O by control groups v1 ({mount.target}); only v2 can limit all pods"
                    raise CannotThrottle(why)
            raise CannotThrottle("no control group hierarchy with the io controller is mounted")
        with syscalls.translating("cannot look for control groups"):
            why = self._hierarchy.obstacle()
        if why:
            raise CannotThrottle(why)

    def limits_of(self, device: volumes.DeviceIdentity) -> volumes.IoLimits:
        """The kernel's limits for the device; none on a node that cannot limit."""
        hierarchy = self._hierarchy
        with syscalls.translating(f"cannot read the I/O limits of {device}"):
            return NONE if hierarchy is None else hierarchy.get(device)

    def set(self, device: volumes.DeviceIdentity, limits: volumes.IoLimits) -> None:
        """Give the kernel these limits, and no others. Cheap if it has them.

        Raises `CannotThrottle`, unless `limits` is empty, and translated errors of the kernel; call it again then.
        """
        if limits != NONE:
            self.check_can_limit()
        hierarchy = self._hierarchy
        if hierarchy is None:
            return  # a node that never limited a device has no limit to remove
        try:
            hierarchy.set(device, limits)
        except OSError as err:
            if err.errno in _GONE:  # NOT_FOUND would mean that the volume does not exist
                raise CannotThrottle(f"{device}: {syscalls.reason(err)}") from err
            raise syscalls.translate(err, f"cannot set the I/O limits of {device}") from err


def _hierarchy(groups: tuple[str, ...]) -> IoMax | None:
    """The hierarchy that has the io controller; a host may have several, and the controller is in one of them."""
    for mount in mountinfo.read_all():
        if mount.fs_type == "cgroup2":
            # none: covered by another mount, or gone
            controllers = syscalls.known_attribute(f"{mount.target}/cgroup.controllers")
            if "io" in controllers.split():
                return IoMax(mount.target, groups)
    return None
