"""A volume on a node and its copies, as steps (`volume_life`): was the source of each copy still while it was made?

Nothing writes to a filesystem that is frozen, on this host or in the guest, nor to a device that is held.
"""

import asyncio
import errno
import fcntl
import os
from dataclasses import dataclass, field

import pytest

from crust.blockdriver.engines import protocol
from crust.blockdriver.engines.files.provisioning import NewFileSnapshotSet, NewFileVolume
from crust.blockdriver.host import fsfreeze
from crust.core import volumes
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import capability
from tests.support.drivers import remnants
from tests.support.nodes.volume_life import Life
from tests.support.runtimes.fake_handler import FakeHandler

_open, _ioctl, _close = os.open, fcntl.ioctl, os.close
"""For the test itself, whose calls never fail."""


def _is_busy(path: str, flags: int, *requests: int) -> bool:
    """Whether the kernel answers EBUSY to an open with these flags, or to the first of these ioctls."""
    try:
        fd = _open(path, flags)
        try:
            for request in requests:
                _ioctl(fd, request, 0)
        finally:
            _close(fd)
    except OSError as err:
        if err.errno != errno.EBUSY:
            raise
        return True
    return False


def is_frozen(mountpoint: str) -> bool:
    return _is_busy(mountpoint, os.O_RDONLY, fsfreeze.FIFREEZE, fsfreeze.FITHAW)


@dataclass
class SnapshotLife(Life):
    """A volume, another one that a pod has on this host, and their copies."""

    guest: FakeHandler = field(default_factory=FakeHandler)
    second_id: str = ""
    snapshot_id: str = ""
    kept: list[str] = field(default_factory=list)
    """Snapshots that belong to no step."""
    group: csi_pb2.VolumeGroupSnapshot = field(default_factory=csi_pb2.VolumeGroupSnapshot)
    mounted: dict[str, str] = field(default_factory=dict)
    """Where this host has mounted a volume."""
    handed_over: str = ""
    """The device that a guest may have."""
    was_still: dict[str, bool] = field(default_factory=dict)
    """By copy: whether nothing could write to its source from the begin of its last attempt to the end."""

    def stands_still(self, volume_id: str) -> bool:
        """Whether nothing can write to the volume now."""
        if volume_id in self.mounted:
            return is_frozen(self.mounted[volume_id])
        if self.claimed is not None:
            return self.target in self.guest.frozen
        return not self.handed_over or _is_busy(self.handed_over, os.O_RDONLY | os.O_EXCL)

    def copies(self) -> list[str]:
        """The snapshots, groups and copied volumes in the pool."""
        names = [*os.listdir(f"{self.node.places.root}/state/snapshots"), *self.images()]
        known = (self.volume_id, self.second_id, *self.kept)
        return [name for name in names if not name.startswith(".") and name not in known]

    def frozen(self) -> list[str]:
        """What a copy has left frozen."""
        return [*filter(is_frozen, self.mounted.values()), *self.guest.frozen]

    def left(self) -> list[str]:
        return self.copies() + self.frozen()

    def is_copied(self) -> bool:
        """Whether the copy is there, of one moment, and nothing is frozen any more."""
        return len(self.copies()) == 1 and all(self.was_still.values()) and not self.frozen()

    def is_gone(self) -> bool:
        return self.left() == []

    async def mount(self) -> None:
        await Life.mount(self)
        self.mounted[self.volume_id] = self.target

    async def defer(self) -> None:
        await Life.defer(self)
        devices = remnants.devices(self.node.places.root)
        (self.handed_over,) = (each.path for each in devices if self.volume_id in each.backing)

    async def second(self) -> None:
        """A pod has the second volume on this host."""
        self.second_id = (await self.node.co.create("second", capability())).volume_id
        self.node.created[self.second_id] = None
        await self.node.stage(self.second_id)
        target = self.node.places.target("two")
        await self.node.publish(self.second_id, target, defer=False)
        self.mounted[self.second_id] = target

    async def snapshot(self) -> None:
        taken = await self.node.co.snapshot(self.volume_id, f"snap-{self.others}")
        self.snapshot_id = taken.snapshot_id

    async def keep(self) -> None:
        self.kept.append(self.snapshot_id)

    async def delete_snapshot(self) -> None:
        await self.node.co.delete_snapshot(self.snapshot_id)

    async def take_group(self) -> None:
        ids = (self.volume_id, self.second_id)
        self.group = await self.node.co.group(*ids, name=f"group-{self.others}")

    async def delete_group(self) -> None:
        await self.node.co.delete_group(self.group)

    async def restore(self) -> None:
        """The snapshot as another volume."""
        made = await self.node.co.create(
            f"other-{self.others}", capability(), snapshot=self.snapshot_id
        )
        self.other_id = made.volume_id

    async def next(self) -> None:
        """Also wait until the driver has removed its intents of freezes, which it repeats."""
        await Life.next(self)
        async with asyncio.timeout(60):
            while os.listdir(f"{self.node.places.root}/driver-run/freezes"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.was_still.clear()


def watch(life: SnapshotLife, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note of each copy whether its source stood still."""
    take, clone = NewFileSnapshotSet.take, NewFileVolume.clone

    def taking(self: NewFileSnapshotSet, image: protocol.Image) -> None:
        life.was_still[image.snapshot_id] = False
        began = life.stands_still(image.volume_id)
        take(self, image)
        life.was_still[image.snapshot_id] = began and life.stands_still(image.volume_id)

    def cloning(making: NewFileVolume, source: volumes.VolumeId, **sizes: int) -> None:
        life.was_still["clone"] = False
        began = life.stands_still(source)
        clone(making, source, **sizes)
        life.was_still["clone"] = began and life.stands_still(source)

    monkeypatch.setattr(NewFileSnapshotSet, "take", taking)
    monkeypatch.setattr(NewFileVolume, "clone", cloning)
