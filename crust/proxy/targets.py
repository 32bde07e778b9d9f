"""The target directory of a deferred publish: there for the kubelet, closed to everyone else.

It carries a tmpfs of 4 KiB and one inode. A kubelet finds a mount point whose root it may chown, as it expects, and a
runtime that misses the handoff entry gets ENOSPC instead of writing to the node's disk. Everything but
`check_allowed` and `is_known_usable` blocks: callers hop to a thread. The walk below the kubelet's root follows
no symbolic link.
"""

import os
from collections.abc import Sequence
from typing import Protocol

from crust import errors, volumes
from crust.host.block import devices
from crust.host.files import target_paths
from crust.host.mounts import mount_api, mountinfo


class TargetMounted(errors.NotReady):
    """Something is mounted where a deferred volume shall be published."""

    def __init__(self, target: str, mount: mountinfo.Mount) -> None:
        super().__init__(
            f"{target} cannot be prepared for a deferred mount",
            why=f"{mount.source} ({mount.fs_type}) is mounted there",
            hint="unpublish the volume first; a publish never switches from a host mount to a deferred one",
        )


class DeviceMountedOnHost(errors.NotReady):
    """The host has the device mounted that a runtime shall get."""

    def __init__(self, device: str, where: Sequence[str]) -> None:
        super().__init__(
            f"the device {device} cannot be handed to a runtime",
            why=f"this node has it mounted at {', '.join(where)}",
            hint="unmount it there first; two kernels writing to one filesystem destroy it",
        )
        self.where = tuple(where)


class Targets(Protocol):
    """What a publish does to this node's directories and mounts, and asks of them."""

    def check_allowed(self, target: volumes.TargetPath) -> None:
        """Raise `target_paths.PathOutsideRoots` unless the target lies below an allowed root. Looks at nothing."""

    def is_known_usable(self, target: volumes.TargetPath) -> bool:
        """Whether it is known at once that `check_usable` would not refuse. Never blocks; False is "not known"."""

    def check_usable(self, target: volumes.TargetPath) -> None:
        """Refuse what could not be prepared: foreign mount, symbolic link, missing parent. Touches nothing."""

    def check_free(self, target: volumes.TargetPath) -> None:
        """Raise `TargetMounted` if anything but our seal is mounted on the target."""

    def check_unmounted(self, source: volumes.BlockSource, *, readonly: bool) -> None:
        """Raise `DeviceMountedOnHost` if the host has the device mounted; all read-only is allowed."""

    def mount_guard(self, target: volumes.TargetPath) -> None:
        """Make the directory if it is not there, and mount the seal if it is not mounted. Idempotent."""

    def has_guard(self, target: volumes.TargetPath) -> bool:
        """Whether our seal is on the target: left by a publish whose record is gone, e.g. with /run."""

    def unmount_guard(self, target: volumes.TargetPath) -> None:
        """Unmount the seal and remove the directory. Idempotent; a foreign mount is left and reported."""


class GuardedTargets:
    """`Targets` on the kernel, below `roots`."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = tuple(roots)

    def check_allowed(self, target: volumes.TargetPath) -> None:
        """See `Targets`."""
        if not any(target.is_below(root) for root in self._roots):
            raise target_paths.PathOutsideRoots(target, self._roots)

    def is_known_usable(self, target: volumes.TargetPath) -> bool:
        """See `Targets`."""
        return target_paths.is_known_free(target, self._roots)

    def check_usable(self, target: volumes.TargetPath) -> None:
        """See `Targets`."""
        os.close(target_paths.open_parent(target, self._roots))
        self.check_free(target)

    def check_free(self, target: volumes.TargetPath) -> None:
        """See `Targets`."""
        self._guard_on(target)

    def check_unmounted(self, source: volumes.BlockSource, *, readonly: bool) -> None:
        """See `Targets`."""
        if devices.is_free(source.path, source.identity):
            return  # in no mount namespace is it mounted; to read the list of mounts takes ten times as long
        found = mountinfo.of_device(source.identity.major, source.identity.minor)
        where = [each.target for each in found if not (readonly and each.readonly)]
        if where:
            raise DeviceMountedOnHost(source.path, where)

    def mount_guard(self, target: volumes.TargetPath) -> None:
        """See `Targets`."""
        made = target_paths.make_directory(target, self._roots)
        if made or self._guard_on(target) is None:
            mount_api.mount_guard(target.text)

    def has_guard(self, target: volumes.TargetPath) -> bool:
        """See `Targets`."""
        mount = mountinfo.at(target.text)
        return mount is not None and mount_api.is_guard(mount)

    def unmount_guard(self, target: volumes.TargetPath) -> None:
        """See `Targets`."""
        self.check_free(target)
        mount_api.unmount(target.text)
        target_paths.remove(target, self._roots)

    def _guard_on(self, target: volumes.TargetPath) -> mountinfo.Mount | None:
        """Our seal, if it is mounted on the target; raises `TargetMounted` for anything else."""
        mount = mountinfo.at(target.text)
        if mount is not None and not mount_api.is_guard(mount):
            raise TargetMounted(target.text, mount)
        return mount
