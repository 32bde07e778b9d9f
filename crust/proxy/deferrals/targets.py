"""The target directory of a deferred publish: it exists for the kubelet, and a guard mount closes it to everyone
else.

The guard mount is a tmpfs that takes names and no data. A kubelet finds a mount point whose root it may chown, and in
which it may create the directories of a `subPath`. A runtime that does not find the handoff entry gets ENOSPC and
cannot write to the node's disk. All methods except `check_allowed` and `is_known_…` block: callers use a thread
hop. No symbolic link below the kubelet's root is followed.
"""

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

from crust import errors, volumes
from crust.host.block import devices
from crust.host.files import cached_targets, target_paths
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import syscalls

_log = logging.getLogger(__name__)


class TargetMounted(errors.NotReady):
    """Another filesystem is mounted on the target of a deferred publish."""

    def __init__(self, target: str, mount: mountinfo.Mount) -> None:
        super().__init__(
            f"{target} cannot be prepared for a deferred mount",
            why=f"{mount.source} ({mount.fs_type}) is mounted there",
            hint="unpublish the volume first; a publish never switches from a host mount to a deferred one",
        )


class DeviceMountedOnHost(errors.NotReady):
    """The host has mounted the device that is to be published to a runtime."""

    def __init__(self, device: str, where: Sequence[str]) -> None:
        super().__init__(
            f"the device {device} cannot be published to a runtime",
            why=f"this node has it mounted at {', '.join(where)}",
            hint="unmount it there first; two kernels writing to one filesystem destroy it",
        )
        self.where = tuple(where)


class Targets(Protocol):
    """The changes and queries of a publish for this node's directories and mounts."""

    def check_allowed(self, target: volumes.TargetPath) -> None:
        """Raise `target_paths.PathOutsideRoots` unless the target lies below an allowed root. No I/O."""

    def is_known_usable(self, target: volumes.TargetPath) -> bool:
        """Whether it is known without I/O that `check_usable` passes. Never blocks; False means unknown."""

    def check_usable(self, target: volumes.TargetPath) -> None:
        """Raise for a target that cannot be prepared: another mount, a symbolic link, a missing parent. Read-only."""

    def check_free(self, target: volumes.TargetPath) -> None:
        """Raise `TargetMounted` if anything but the guard is mounted on the target."""

    def check_unmounted(
        self, source: volumes.BlockSource, *, readonly: bool, probe: bool = True
    ) -> None:
        """Raise `DeviceMountedOnHost` if the host has mounted the device; read-only mounts of a reader are
        allowed. The probe opens the device exclusively for a moment: not where a sandbox may do so.
        """

    def mount_guard(self, target: volumes.TargetPath) -> bool:
        """Create the directory and mount the guard, if they are absent; returns whether it was absent."""

    def prepare_guard(self) -> None:
        """Have a guard ready, so that the next `mount_guard` need not make one. For when nobody waits."""

    def has_guard(self, target: volumes.TargetPath) -> bool:
        """Whether the guard is mounted on the target. It may outlive the record, e.g. if /run was lost."""

    def is_known_unguarded(self, target: volumes.TargetPath) -> bool:
        """Whether it is known without I/O that `has_guard` is False. Never blocks; False means unknown."""

    def unmount_guard(self, target: volumes.TargetPath) -> None:
        """Unmount the guard and remove the directory. Idempotent; raises `TargetMounted` for another mount."""

    def guards(self) -> Iterable[str]:
        """The targets that carry a guard, also below another mount."""

    def restore_guard(self, target: volumes.TargetPath) -> None:
        """Mount the guard that was lost, also over files that were written meanwhile; raises for another mount."""

    def mounts_changed(self) -> bool:
        """Whether mounts may have changed since the last question. Never blocks."""


class GuardedTargets:
    """`Targets` on the kernel, below `roots`."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = tuple(roots)
        self._changes = mountinfo.Changes()
        self._own: dict[str, int] = {}
        """The guards that this process has mounted, by target: their ids, which no other mount gets. They are known
        again by one system call; the list of mounts grows with the node.
        """
        self._mounted: set[str] = set()
        """The targets on which this process has mounted a guard."""
        self._found: frozenset[str] | None = None
        """Those on which it has found one at its start. No other process mounts any. None while that is not known."""
        self._ready: list[mount_api.Guard] = []
        """Guards that are mounted nowhere: one, or none."""
        weakref.finalize(self, _close, self._ready)

    def check_allowed(self, target: volumes.TargetPath) -> None:
        """See `Targets`."""
        if not any(target.is_below(root) for root in self._roots):
            raise target_paths.PathOutsideRoots(target, self._roots)

    def is_known_usable(self, target: volumes.TargetPath) -> bool:
        """See `Targets`."""
        return cached_targets.is_known_free(target, self._roots)

    def check_usable(self, target: volumes.TargetPath) -> None:
        """See `Targets`."""
        os.close(target_paths.open_parent(target, self._roots))
        self.check_free(target)

    def check_free(self, target: volumes.TargetPath) -> None:
        """See `Targets`."""
        self._guard_on(target)

    def check_unmounted(
        self, source: volumes.BlockSource, *, readonly: bool, probe: bool = True
    ) -> None:
        """See `Targets`."""
        if probe and devices.is_free(source.path, source.identity):
            return  # it is mounted in no mount namespace; reading the mount list takes ten times as long
        found = mountinfo.of_device(source.identity.major, source.identity.minor)
        where = [each.target for each in found if not (readonly and each.readonly)]
        if where:
            raise DeviceMountedOnHost(source.path, where)

    def mount_guard(self, target: volumes.TargetPath) -> bool:
        """See `Targets`."""
        with target_paths.made_directory(target, self._roots) as (directory, made):
            if not made and self._guard_on(target):
                return False
            self._mount_guard(target, directory)
        return True

    def _mount_guard(self, target: volumes.TargetPath, directory: str) -> None:
        self._mounted.add(target.text)  # before it is there: who asks meanwhile must not miss it
        try:
            guard = self._ready.pop()
        except IndexError:
            guard = mount_api.new_guard()
        unique_id = mount_api.attach_guard(guard, directory)
        if unique_id is not None:
            self._own[target.text] = unique_id

    def prepare_guard(self) -> None:
        """See `Targets`."""
        if not self._ready:
            self._ready.append(mount_api.new_guard())

    def has_guard(self, target: volumes.TargetPath) -> bool:
        """See `Targets`."""
        if self._is_own(target):
            return True
        mount = mountinfo.at(target.text)
        return mount is not None and mount_api.is_guard(mount)

    def is_known_unguarded(self, target: volumes.TargetPath) -> bool:
        """See `Targets`.

        A guard is below a root, behind no link. So a target that is spelled like none of them has none, unless a link
        leads from it to one: that takes a look at the names on the way, from the kernel's caches.
        """
        if self._found is None or target.text in self._found or target.text in self._mounted:
            return False
        return cached_targets.is_known_linkless(target, self._roots)

    def unmount_guard(self, target: volumes.TargetPath) -> None:
        """See `Targets`."""
        while self._guard_on(target):  # never another mount that is stacked on it
            parent = target_paths.open_parent(target, self._roots)
            try:
                mount_api.unmount_one(target.text, parent=parent)
            finally:
                os.close(parent)
        self._own.pop(target.text, None)
        self._mounted.discard(target.text)
        target_paths.remove_empty_below(target, self._roots)
        target_paths.remove(target, self._roots)

    def guards(self) -> Iterable[str]:
        """See `Targets`."""
        found = (mount for root in self._roots for mount in mountinfo.below(root))
        targets = {mount.target for mount in found if mount_api.is_guard(mount)}
        if self._found is None and all(os.path.realpath(root) == root for root in self._roots):
            self._found = frozenset(
                targets
            )  # a CO spells them as the kernel: no link leads to a root
        return targets

    def restore_guard(self, target: volumes.TargetPath) -> None:
        """See `Targets`."""
        target_paths.remove_empty_below(target, self._roots)  # a kubelet's, for a subPath
        try:
            self.mount_guard(target)
        except target_paths.TargetConflict as error:
            self.check_free(target)
            _log.error(
                "files were written to a target whose guard mount was lost",
                extra={"target": target.text, "error": str(error)},
            )
            with target_paths.opened(target, self._roots) as directory:
                self._mount_guard(target, directory)

    def mounts_changed(self) -> bool:
        """See `Targets`."""
        return self._changes.seen()

    def _guard_on(self, target: volumes.TargetPath) -> bool:
        """Whether the guard is mounted on the target; raises `TargetMounted` for another mount."""
        if self._is_own(target):
            return True
        mount = mountinfo.at(target.text)
        if mount is not None and not mount_api.is_guard(mount):
            raise TargetMounted(target.text, mount)
        return mount is not None

    def _is_own(self, target: volumes.TargetPath) -> bool:
        unique_id = self._own.get(target.text)
        if unique_id is None:
            return False
        try:
            return syscalls.unique_mount_rooted_at(target.text) == unique_id
        except OSError:  # absent, or it answers with errors: mountinfo says which
            return False


def _close(guards: list[mount_api.Guard]) -> None:
    for each in guards:
        os.close(each.mount)
