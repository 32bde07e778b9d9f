"""Targets and devices without a kernel: a guard mount is a file, so that it outlives a killed proxy as a mount does.

The walk to the target is the real one (`crust.host.files.target_paths`); only mounting is played.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crust.core import errors, volumes
from crust.host.block import users
from crust.host.block.device_sets import DeviceSet
from crust.host.block.devices import NotABlockDevice
from crust.host.block.holders import DeviceInUse, Holder
from crust.host.block.openers import Openers
from crust.host.files import target_paths
from crust.host.mounts import mountinfo
from crust.host.process import syscalls
from crust.proxy import guard
from crust.proxy.target import Guard, MountStack, TargetState
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers import fake_driver
from tests.support.memory_csi.node import Mounts
from tests.support.memory_csi.state import Published

GUARD = ".guarded"
MOUNTED = ".mounted"
"""A driver's own mount on the target, over the guard or not."""


class MarkedMounts(Mounts):
    """A driver's mount is the file `MOUNTED` in the target; a target for a raw volume is a file, as CSI says."""

    def publish(self, request: csi_pb2.NodePublishVolumeRequest) -> None:
        target = Path(request.target_path)
        if request.volume_capability.HasField("block"):
            target.touch()
        elif not request.defer_fs_ops:
            target.mkdir(parents=True, exist_ok=True)
            (target / MOUNTED).touch()

    def unpublish(self, request: csi_pb2.NodeUnpublishVolumeRequest) -> None:
        target = Path(request.target_path)
        if target.is_file():
            target.unlink()
        elif (target / MOUNTED).exists():
            (target / MOUNTED).unlink()
            with contextlib.suppress(OSError):
                target.rmdir()


class FakeTargets(guard.Targets):
    """`guard.Targets` below one root. `foreign` are targets on which something else is mounted."""

    def __init__(self, root: str) -> None:
        super().__init__([root])
        self.root = root
        self.foreign: set[str] = set()
        self.mounted_devices: dict[str, bool] = {}
        """Devices that the host has mounted, and whether read-only."""
        self.written: set[str] = set()
        """Devices that a process writes to."""
        self.in_flight: set[str] = set()
        """Devices to which the writes of an ended process are on their way."""
        self.host_mounts: dict[str, str] = {}
        """The devices of the filesystems that a driver has mounted on targets."""
        self.groups: dict[str, int] = {}
        """The groups of guards, as a kubelet sets them."""
        self.named: set[str] = set()
        """The targets whose guard takes names."""
        self.devices = FakeDevices()

    def look(self, target: volumes.TargetPath) -> TargetState:
        guarded = os.path.exists(f"{target}/{GUARD}")
        if self._is_foreign(target):
            stack = MountStack.BURIED if guarded else MountStack.FOREIGN
            return TargetState(stack=stack, mount=_mount(target.text))
        return TargetState(stack=MountStack.GUARD if guarded else MountStack.CLEAR)

    def guard_at(self, target: volumes.TargetPath) -> Guard | None:
        if not self.has_guard(target):
            return None
        return Guard(self.groups.get(target.text, 0), target.text in self.named)

    def check_unused(
        self, source: volumes.BlockSource, *, readonly: bool, opened: Openers | None
    ) -> None:
        self.check_mounts(source, readonly=readonly)
        self.check_given_back(source)
        mine = self.devices.device_set(source.identity)
        for target in self.devices.nodes:
            bound = guard.devices_at(self.devices, target)
            is_read = readonly and bound is not None and self.devices.published[target].readonly
            if bound is not None and bound.shares_bytes_with(mine) and not is_read:
                raise DeviceInUse(source.path, (target,))

    def check_mounts(self, source: volumes.BlockSource, *, readonly: bool) -> None:
        mounted_readonly = self.mounted_devices.get(source.path)
        if mounted_readonly is not None and not (readonly and mounted_readonly):
            raise users.mounted_on_host(source.path, [("self", _mount("/mnt"))])

    def check_given_back(self, source: volumes.BlockSource) -> None:
        if source.path in self.written:
            raise DeviceInUse(source.path, holders=(Holder(1000, "qemu", "fd 3", writes=True),))

    def check_writes_ended(self, source: volumes.BlockSource) -> None:
        if source.path in self.in_flight:
            raise errors.PeerUnavailable.named("WritesInFlight", source.path)

    def openers(self) -> Openers:
        return {}

    def mounted_device(self, path: str) -> str | None:
        return self.host_mounts.get(path)

    def mount_guard(self, target: volumes.TargetPath, *, names: bool) -> None:
        self._check_free(target)
        (self.named.add if names else self.named.discard)(target.text)
        if self.has_guard(target):
            return
        self.groups.pop(target.text, None)
        with (
            target_paths.made_directory(target, [self.root]) as (directory, _),
            syscalls.translating(f"cannot mount on {target}"),
        ):
            os.close(os.open(f"{directory}/{GUARD}", os.O_WRONLY | os.O_CREAT, 0o600))

    def seal(self, target: volumes.TargetPath) -> None:
        """Nothing: the guard is a file, which lies in the directory itself."""

    def restore_guard(self, target: volumes.TargetPath, guard: Guard | None) -> None:
        self.mount_guard(target, names=guard is not None and guard.names)
        if guard is not None:
            self.groups[target.text] = guard.group

    def unmount_guard(self, target: volumes.TargetPath) -> None:
        self._check_free(target)
        if self.has_guard(target):
            for name in os.listdir(target.text):  # a tmpfs takes the names in it along
                if name != GUARD:
                    shutil.rmtree(f"{target}/{name}")
            os.unlink(f"{target}/{GUARD}")
        target_paths.remove(target, [self.root])

    def has_guard(self, target: volumes.TargetPath) -> bool:
        """Whether the guard is on top."""
        return self.look(target).stack is MountStack.GUARD

    def stacks(self) -> Mapping[str, MountStack]:
        # not rglob, which fails when a directory goes away meanwhile
        guarded = {directory for directory, _, files in os.walk(self.root) if GUARD in files}
        return {path: self.look(volumes.TargetPath(path)).stack for path in guarded | self.foreign}

    def mounts_changed(self) -> bool:
        return True

    def _check_free(self, target: volumes.TargetPath) -> None:
        seen = self.look(target)
        if seen.is_covered:
            raise seen.mounted(target)

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
    numbers: dict[int, volumes.BlockSource] = field(default_factory=dict)
    """Devices by number, as a driver publishes them at a shim's leaf."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Nodes at the targets of raw publishes: path to the device's path. It is there while it is `published`."""
    published: Mapping[str, Published] = field(default_factory=dict)
    """What the driver has published, by target."""

    def identify(self, path: str, /) -> volumes.DeviceIdentity:
        if path in self.published:
            path = self.nodes.get(path, path)
        if os.path.exists(path):
            raise NotABlockDevice(path)
        if not path.startswith("/dev/"):
            raise errors.NotFound(f"there is no {path}")
        volume_id = path.removeprefix(fake_driver.device_of(""))
        identity = self.identities.get(volume_id) or fake_driver.identity_of(path)
        return volumes.DeviceIdentity(*identity)

    def of_number(self, number: int, /) -> volumes.BlockSource | None:
        return self.numbers.get(number)

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
