"""The guard mount on a deferred target, and the look at a target.

The guard mount is a tmpfs that takes no data. A kubelet finds a mount point whose root it may chown, and in which it
may create the directories of a `subPath`, if the handler mounts such paths: else the guard takes no names either. A
runtime that does not find the handoff entry gets ENOSPC and cannot write to the node's disk. The directory below the
guard is sealed (`crust.host.files.sealed`): a bind mount of a directory above shows it without the guard. All methods
except `check_allowed` block: callers use a thread hop. No symbolic link below the kubelet's root is followed.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from crust.core import errors, volumes
from crust.host import answers
from crust.host.block import devices, openers, users
from crust.host.block.device_sets import DeviceSet
from crust.host.block.devices import NotABlockDevice
from crust.host.block.openers import Openers
from crust.host.block.users import Purpose
from crust.host.files import listing, sealed, target_paths
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import syscalls
from crust.proxy.target import Guard, MountStack, TargetState

_KUBELET_TARGETS = "pods/*/volumes/kubernetes.io~csi/*/mount"
"""The targets of volumes with a filesystem, below a kubelet's root."""

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
        self._changes = mountinfo.MountWatch()

    def check_allowed(self, target: volumes.TargetPath) -> None:
        """Raise `target_paths.PathOutsideRoots` unless the target lies below an allowed root. No I/O."""
        target_paths.root_of(target, self._roots)

    def look(self, target: volumes.TargetPath) -> TargetState:
        """The mounts on the target, in a `TargetState` without an entry."""
        mount = mountinfo.at(target.text)
        if mount is None:
            return TargetState()
        if mount_api.is_guard(mount):
            return TargetState(stack=MountStack.GUARD)
        is_buried = any(map(mount_api.is_guard, mountinfo.stacked_at(target.text)))
        return TargetState(
            stack=MountStack.BURIED if is_buried else MountStack.FOREIGN, mount=mount
        )

    def guard_at(self, target: volumes.TargetPath) -> Guard | None:
        """The guard on top of the target, if there is one."""
        if self.look(target).stack is not MountStack.GUARD:
            return None
        with syscalls.translating(f"cannot look at the guard mount of {target}"):
            try:
                group = os.stat(target.text, follow_symlinks=False).st_gid
                return Guard(group, mount_api.takes_names(target.text))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def stacks(self) -> Mapping[str, MountStack]:
        """The mounts below the roots, by path."""
        stacks: dict[str, MountStack] = {}
        for root in self._roots:
            real = os.path.realpath(root)
            for mount in mountinfo.below(real):
                path = f"{root.rstrip('/')}{mount.target[len(real) :]}"  # as a CO spells it
                if mount_api.is_guard(mount):
                    stacks[path] = MountStack.GUARD
                elif stacks.get(path) is MountStack.GUARD:
                    stacks[path] = MountStack.BURIED
                else:
                    stacks.setdefault(path, MountStack.FOREIGN)
        return stacks

    def mounts_changed(self) -> bool:
        """Whether mounts may have changed since the last question. Never blocks."""
        return self._changes.has_changed()

    def mount_guard(self, target: volumes.TargetPath, *, names: bool) -> None:
        """Create the directory and mount the guard, if they are absent; raises TargetMounted for another mount.

        The guard of an attempt for a handler with other features is replaced.
        """
        with target_paths.made_directory(target, self._roots) as (directory, is_new):
            if is_new or not self._guard_on(target):
                sealed.seal(directory, target)
                mount_api.mount_guard(directory, names=names)
                return
        if mount_api.takes_names(target.text) is not names:
            self.unmount_guard(target)
            self.mount_guard(target, names=names)

    def restore_guard(self, target: volumes.TargetPath, guard: Guard | None) -> None:
        """Mount the lost guard as it was, also over later files. A guard that no look has seen takes no names."""
        if self._guard_on(target):
            return
        try:
            self.unseal(target)
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
            names, group = (guard.names, guard.group) if guard is not None else (False, None)
            try:
                sealed.seal(directory, target)
            finally:  # a guard alone protects from all but a bind of a directory above
                mount_api.mount_guard(directory, names=names, group=group)

    def unmount_guard(self, target: volumes.TargetPath) -> None:
        """Unmount the guard and remove the directory. Idempotent; raises TargetMounted for another mount."""
        is_guarded = self._guard_on(target)  # never another mount that is stacked on it
        self.unseal(target)
        while is_guarded:
            with target_paths.parent_of(target, self._roots) as parent:
                mount_api.unmount_one(target.text, parent=parent)
            is_guarded = self._guard_on(target)
        target_paths.remove_empty_below(target, self._roots)
        target_paths.remove(target, self._roots)

    def check_unused(
        self, source: volumes.BlockSource, *, readonly: bool, opened: Openers | None
    ) -> None:
        """Raise unless a guest may have the device: as `users.check`, with this look at all processes."""
        purpose = Purpose.GUEST_READS if readonly else Purpose.GUEST_WRITES
        users.check(
            source, purpose, look=lambda: users.look_at_host(opened), published_below=self._roots
        )

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

    def settle_seals(self) -> None:
        """Seal the kubelet's targets that have a guard, and unseal those on which nothing is mounted.

        A reboot leaves a seal without a guard, and nobody could remove that target: neither a kubelet that cleans up,
        nor a driver that mounts there now. A killed unpublish leaves a guard without a seal. A target that cannot be
        changed is told, and stops no other one.
        """
        stacks = self.stacks()
        for root in self._roots:
            try:
                paths = [str(path) for path in listing.matching(root, _KUBELET_TARGETS)]
            except errors.CrustError as error:
                _log.warning("targets of an earlier boot may be immutable", extra={"error": error})
                continue
            for target in map(volumes.TargetPath, paths):
                extra: dict[str, object] = {"target": target.text}
                stack = stacks.get(target.text)
                try:
                    if stack in (MountStack.GUARD, MountStack.BURIED):
                        self.seal(target)
                    elif stack is None and self.unseal(target):
                        _log.info("unsealed a target without a guard mount", extra=extra)
                except errors.CrustError as error:
                    extra["error"] = error
                    _log.warning("a target is not as its mounts want it", extra=extra)

    def unseal_all(self) -> None:
        """Unseal the kubelet's targets, whatever is mounted there: no proxy does it later. Raises the first error."""
        for root in self._roots:
            for path in listing.matching(root, _KUBELET_TARGETS):
                self.unseal(volumes.TargetPath(str(path)))

    def unseal(self, target: volumes.TargetPath) -> bool:
        """Unseal the target, below its mounts; returns whether it was sealed. An absent one is not."""
        try:
            with self._below_mounts(target) as directory:
                return sealed.unseal(directory, target)
        except errors.NotFound:
            return False

    def seal(self, target: volumes.TargetPath) -> None:
        with self._below_mounts(target) as directory:
            sealed.seal(directory, target)

    @contextmanager
    def _below_mounts(self, target: volumes.TargetPath) -> Iterator[str]:
        """A path of the target's directory, whatever is mounted on it: in a copy of the mount above."""
        with (
            target_paths.parent_of(target, self._roots) as parent,
            syscalls.translating(f"cannot look below the mounts of {target}"),
            syscalls.closing(syscalls.open_tree(f"/proc/self/fd/{parent}")) as above,
        ):
            yield f"/proc/self/fd/{above}/{os.path.basename(target.text)}"

    def _guard_on(self, target: volumes.TargetPath) -> bool:
        """Whether the guard is on top; raises TargetMounted for another mount."""
        seen = self.look(target)
        if seen.is_covered:
            raise seen.mounted(target)
        return seen.stack is MountStack.GUARD
