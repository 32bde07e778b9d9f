"""Targets and devices without a kernel: a guard mount is a file, so that it outlives a killed proxy as a mount does.

The walk to the target is the real one (`crust.host.files.target_paths`); only mounting is played.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from crust import errors, volumes
from crust.host.block.device_sets import DeviceSet
from crust.host.files import cached_targets, target_paths
from crust.host.mounts import mountinfo
from crust.host.process import oserrors
from crust.proxy.deferrals import targets
from tests.support.drivers import fake_driver

GUARD = ".guarded"
MOUNTED = ".mounted"
"""A driver's own mount on the target, over the guard or not; made by `tests.support.drivers.mounting_driver`."""


class FakeTargets:
    """`targets.Targets` below one root. `foreign` are targets on which something else is mounted."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.foreign: set[str] = set()
        self.mounted_devices: dict[str, bool] = {}
        """Devices that the host has mounted, and whether read-only."""

    def check_allowed(self, target: volumes.TargetPath) -> None:
        targets.GuardedTargets([self.root]).check_allowed(target)

    def is_known_usable(self, target: volumes.TargetPath) -> bool:
        if self._is_foreign(target) or self.has_guard(target):
            return False
        return cached_targets.is_known_free(target, [self.root])

    def check_usable(self, target: volumes.TargetPath) -> None:
        os.close(target_paths.open_parent(target, [self.root]))
        self.check_free(target)

    def check_free(self, target: volumes.TargetPath) -> None:
        if self._is_foreign(target):
            raise targets.TargetMounted(target.text, _mount(target.text))

    def check_unmounted(
        self, source: volumes.BlockSource, *, readonly: bool, probe: bool = True
    ) -> None:
        mounted_readonly = self.mounted_devices.get(source.path)
        if mounted_readonly is not None and not (readonly and mounted_readonly):
            raise targets.DeviceMountedOnHost(source.path, ["/mnt"])

    def mount_guard(self, target: volumes.TargetPath) -> bool:
        self.check_free(target)
        if self.has_guard(target):
            return False
        target_paths.make_directory(target, [self.root])
        with oserrors.translating(f"cannot mount on {target}"):
            os.close(os.open(f"{target}/{GUARD}", os.O_WRONLY | os.O_CREAT, 0o600))
        return True

    def prepare_guard(self) -> None:
        """Nothing to prepare."""

    def has_guard(self, target: volumes.TargetPath) -> bool:
        return not self._is_foreign(target) and os.path.exists(f"{target}/{GUARD}")

    def is_known_unguarded(self, target: volumes.TargetPath) -> bool:
        if os.path.exists(f"{target}/{GUARD}"):
            return False
        return cached_targets.is_known_linkless(target, [self.root])

    def unmount_guard(self, target: volumes.TargetPath) -> None:
        self.check_free(target)
        if self.has_guard(target):
            for name in os.listdir(target.text):  # a tmpfs takes the names in it along
                if name != GUARD:
                    shutil.rmtree(f"{target}/{name}")
            os.unlink(f"{target}/{GUARD}")
        target_paths.remove(target, [self.root])

    def guards(self) -> Iterable[str]:
        # not rglob, which fails when a directory goes away meanwhile
        return {directory for directory, _, files in os.walk(self.root) if GUARD in files}

    def restore_guard(self, target: volumes.TargetPath) -> None:
        self.mount_guard(target)

    def mounts_changed(self) -> bool:
        return True

    def _is_foreign(self, target: volumes.TargetPath) -> bool:
        return target.text in self.foreign or os.path.exists(f"{target}/{MOUNTED}")


@dataclass
class FakeDevices:
    """`devices.Devices`: sizes by path, and the identities that a driver reports, by volume id."""

    sizes_bytes: dict[str, int] = field(default_factory=dict)
    default_bytes: int = 64 * 1024 * 1024
    sizes_file: str = ""
    """JSON that another process writes, read at each question."""
    identities: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    related: dict[volumes.DeviceIdentity, DeviceSet] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    """Nodes elsewhere: path to the device's path."""

    def identify(self, path: str, /) -> volumes.DeviceIdentity:
        path = self.nodes.get(path, path)
        if not path.startswith("/dev/"):
            raise errors.NotFound(f"there is no {path}")
        volume_id = path.removeprefix(fake_driver.device_of(""))
        found = self.identities.get(volume_id) or fake_driver.identity_of(path)
        return volumes.DeviceIdentity(*found)

    def size_bytes(self, path: str, /) -> int:
        sizes = self.sizes_bytes
        if self.sizes_file and os.path.exists(self.sizes_file):
            with open(self.sizes_file, encoding="utf-8") as file:
                sizes = json.load(file)
        return sizes.get(path, self.default_bytes)

    def device_set(self, identity: volumes.DeviceIdentity, /) -> DeviceSet:
        return self.related.get(identity, DeviceSet.alone(identity))


def _mount(target: str) -> mountinfo.Mount:
    return mountinfo.Mount(
        mount_id=1, parent_id=0, major=8, minor=1, root="/", target=target, options=("rw",),
        fs_type="xfs", source="/dev/sdb1", super_options=("rw",),
    )  # fmt: skip
