"""The guard mount on a deferred target, and the look at a target.

The guard mount is a tmpfs that takes no data. A kubelet finds a mount point whose root it may chown, and in which it
may create the directories of a `subPath`, if the handler mounts such paths: else the guard takes no names either. A
runtime that does not find the handoff entry gets ENOSPC and cannot write to the node's disk. All methods except
`check_allowed` block: callers use a thread hop. No symbolic link below the kubelet's root is followed.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from crust.core import errors, volumes
from crust.host import answers
from crust.host.block import devices, openers, users
from crust.host.block.device_sets import DeviceSet
from crust.host.block.devices import NotABlockDevice
from crust.host.block.openers import Openers
from crust.host.block.users import Purpose
from crust.host.files import target_paths
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import syscalls
from crust.proxy.target import Guard, Seen, Stack

_log = logging.getLogger(__name__)


class Devices(Protocol):
    """The queries about block devices that the proxy makes; `crust.host.block.devices` implements them. All block."""

    def identify(self, path: str, /) -> volumes.DeviceIdentity:
        """The device's identity; raises `errors.NotFound`, `devices.NotABlockDevice`."""

    def of_number(self, number: int, /) -> volumes.BlockSource | None:
        """The device of a number; None if it has gone. Raises `NotSeen`."""

    def size_bytes(self, path: str, /) -> int:
        """The device's size now; raises as `identify` does."""

    def device_set(self, identity: volumes.DeviceIdentity, /) -> DeviceSet:
        """The devices that share bytes with this one."""


def set_of(devices: Devices, device: volumes.DeviceIdentity | volumes.NetworkImage) -> DeviceSet:
    """The set of a published device or image. An image is itself alone: this host has no device of it. Blocks."""
    if isinstance(device, volumes.NetworkImage):
        return DeviceSet.alone(device.identity)
    return devices.device_set(device)


def verify(devices: Devices, source: volumes.BlockSource | volumes.NetworkImage) -> DeviceSet:
    """The set of the device that the driver reported; raises DeviceNotAsReported. Blocks.

    If the driver names the wrong device, its reservation protects nothing. Only the cluster knows whether an image
    exists: the runtime asks the cluster, with the key, before it attaches the image.
    """
    if isinstance(source, volumes.NetworkImage):
        return set_of(devices, source)
    try:
        identity = devices.identify(source.path)
        problem = ""
    except (errors.NotFound, NotABlockDevice) as error:
        identity, problem = None, f"{error.what}: {error.why}"
    if identity != source.identity:
        why = problem or f"the kernel has {identity}"
        raise errors.RuntimeFailed.named(
            "DeviceNotAsReported",
            f"the device {source.path} cannot be published to a runtime",
            why=f"the driver reports device {source.identity} there, and {why}",
            hint="read the driver's log; retry if the device was attached again meanwhile",
        )
    return devices.device_set(source.identity)


def devices_at(devices: Devices, path: str) -> DeviceSet | None:
    """The set of the device at the path; None without a device. Raises the reason if it cannot be read. Blocks."""
    try:
        return devices.device_set(devices.identify(path))
    except (errors.NotFound, NotABlockDevice):
        return None


class Targets:
    """The changes and queries of a publish for this node's directories and mounts, below `roots`."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = tuple(roots)
        self._changes = mountinfo.Changes()

    def check_allowed(self, target: volumes.TargetPath) -> None:
        """Raise `target_paths.PathOutsideRoots` unless the target lies below an allowed root. No I/O."""
        target_paths.root_of(target, self._roots)

    def look(self, target: volumes.TargetPath) -> Seen:
        """The mounts on the target, in a `Seen` without an entry."""
        mount = mountinfo.at(target.text)
        if mount is None:
            return Seen()
        if mount_api.is_guard(mount):
            return Seen(stack=Stack.GUARD)
        is_buried = any(map(mount_api.is_guard, mountinfo.stacked_at(target.text)))
        return Seen(stack=Stack.BURIED if is_buried else Stack.FOREIGN, mount=mount)

    def guard_at(self, target: volumes.TargetPath) -> Guard | None:
        """The guard on top of the target, if there is one."""
        if self.look(target).stack is not Stack.GUARD:
            return None
        with syscalls.translating(f"cannot look at the guard mount of {target}"):
            try:
                group = os.stat(target.text, follow_symlinks=False).st_gid
                return Guard(group, mount_api.takes_names(target.text))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def stacks(self) -> Mapping[str, Stack]:
        """The mounts below the roots, by path."""
        stacks: dict[str, Stack] = {}
        for root in self._roots:
            real = os.path.realpath(root)
            for mount in mountinfo.below(real):
                path = f"{root}{mount.target[len(real) :]}"  # as a CO spells it
                if mount_api.is_guard(mount):
                    stacks[path] = Stack.GUARD
                elif stacks.get(path) is Stack.GUARD:
                    stacks[path] = Stack.BURIED
                else:
                    stacks.setdefault(path, Stack.FOREIGN)
        return stacks

    def mounts_changed(self) -> bool:
        """Whether mounts may have changed since the last question. Never blocks."""
        return self._changes.have_happened()

    def mount_guard(self, target: volumes.TargetPath, *, names: bool) -> None:
        """Create the directory and mount the guard, if they are absent; raises TargetMounted for another mount.

        The guard of an attempt for a handler with other features is replaced.
        """
        with target_paths.made_directory(target, self._roots) as (directory, is_new):
            if is_new or not self._guard_on(target):
                mount_api.mount_guard(directory, names=names)
                return
        if mount_api.takes_names(target.text) is not names:
            self.unmount_guard(target)
            self.mount_guard(target, names=names)

    def restore_guard(self, target: volumes.TargetPath, guard: Guard | None) -> None:
        """Mount the lost guard as it was, also over files that were written meanwhile. A guard that no look has
        seen takes no names.
        """
        if self._guard_on(target):
            return
        try:
            # a kubelet made them for a subPath
            target_paths.remove_empty_below(target, self._roots)
            target_paths.make_directory(target, self._roots)
        except target_paths.SymlinkInPath:
            raise
        except errors.CrustError as error:  # the mount, which follows, decides
            _log.error(
                "files were written to a target whose guard mount was lost, or it cannot be cleared",
                extra={"target": target.text, "error": str(error)},
            )
        with target_paths.parent_of(target, self._roots) as parent:
            directory = f"/proc/self/fd/{parent}/{os.path.basename(target.text)}"
            if guard is None:
                mount_api.mount_guard(directory)
            else:
                mount_api.mount_guard(directory, names=guard.names, group=guard.group)

    def unmount_guard(self, target: volumes.TargetPath) -> None:
        """Unmount the guard and remove the directory. Idempotent; raises TargetMounted for another mount."""
        while self._guard_on(target):  # never another mount that is stacked on it
            with target_paths.parent_of(target, self._roots) as parent:
                mount_api.unmount_one(target.text, parent=parent)
        target_paths.remove_empty_below(target, self._roots)
        target_paths.remove(target, self._roots)

    def check_unused(
        self, source: volumes.BlockSource, *, readonly: bool, opened: Openers | None
    ) -> None:
        """Raise unless a guest may have the device: as `users.check`, with this look at all processes."""
        purpose = Purpose.GUEST_READS if readonly else Purpose.GUEST_WRITES
        users.check(source, purpose, opened=opened, published_below=self._roots)

    def check_mounts(self, source: volumes.BlockSource, *, readonly: bool) -> None:
        """As `users.check_mounts_here`, for a device that the target's own sandbox may have."""
        users.check_mounts_here(source, readonly=readonly)

    def check_given_back(self, source: volumes.BlockSource) -> None:
        """Raise unless the driver may have the device back: as `users.check`."""
        users.check(source, Purpose.GIVE_BACK)

    def check_writes_ended(self, source: volumes.BlockSource) -> None:
        """As `users.check_writes_ended`, for a device whose sandbox was seen to have ended."""
        users.check_writes_ended(source)

    def openers(self) -> Openers:
        """As `openers.openers`."""
        return openers.openers()

    def mounted_device(self, path: str) -> str | None:
        """The node of the device whose filesystem is mounted at a path; None without a mount, or for a filesystem
        that has no device. Raises `NotSeen` for a device that is not known.
        """
        mount = mountinfo.at(path)
        if mount is None or not (mount.major or mount.fs_type == "btrfs"):
            return None
        try:
            return devices.node_of(os.makedev(mount.major, mount.minor))
        except (errors.NotFound, devices.DeviceNodeMissing) as error:
            raise answers.NotSeen(
                f"cannot see the device of the {mount.fs_type} at {path}",
                why=f"{error.what}: {error.why}",
                hint="check that this process sees the host's /dev",
            ) from error

    def _guard_on(self, target: volumes.TargetPath) -> bool:
        """Whether the guard is on top; raises TargetMounted for another mount."""
        seen = self.look(target)
        if seen.is_covered:
            raise seen.mounted(target)
        return seen.stack is Stack.GUARD
