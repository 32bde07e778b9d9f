"""Each call by which a copy is made, or a snapshot removed, fails once: an answered copy is of one moment, and no
filesystem stays frozen.

As `test_lies`, at the RPCs of snapshots, with the calls that change files, and FIFREEZE and FITHAW, among those that
fail. A copy is of one moment if nothing could write while it was made: the filesystem was frozen, on this host or in
the guest, or the device was held.
"""

import asyncio
import errno
import fcntl
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from crust.blockdriver.engines import protocol
from crust.blockdriver.engines.files.provisioning import FileMaking, FileTaking
from crust.blockdriver.host import fsfreeze
from crust.core import volumes
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import capability
from tests.support.drivers import remnants
from tests.support.faults import lies
from tests.support.faults.node_lies import lied
from tests.support.nodes.places import Places
from tests.support.nodes.served_node import BlockNode, started
from tests.support.nodes.volume_life import Act, Life, Step, wrong_answers
from tests.support.runtimes.fake_handler import FakeHandler

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

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


Way = tuple[Act[SnapshotLife], ...]


def _copied(by: Act[SnapshotLife], before: Way, *, undo: Act[SnapshotLife]) -> Step[SnapshotLife]:
    """A step that makes a copy."""
    after = (undo, SnapshotLife.next)
    return Step(by, before, after, is_done=SnapshotLife.is_copied, left=SnapshotLife.left)


def _removed(by: Act[SnapshotLife], made: Act[SnapshotLife], before: Way) -> Step[SnapshotLife]:
    """A step that removes what `made` makes."""
    return Step(by, (*before, made), (SnapshotLife.next, made), is_done=SnapshotLife.is_gone)


ON_HOST: Way = (SnapshotLife.stage, SnapshotLife.mount)
WAITING: Way = (SnapshotLife.stage, SnapshotLife.defer)
IN_GUEST: Way = (*WAITING, SnapshotLife.claim)
BOTH: Way = (SnapshotLife.second, *IN_GUEST)
TAKE, DROP = SnapshotLife.snapshot, SnapshotLife.delete_snapshot
GROUP, DROP_GROUP = SnapshotLife.take_group, SnapshotLife.delete_group
CLONE, DELETE = SnapshotLife.copy, SnapshotLife.delete
STEPS = {
    "snapshot-idle": _copied(TAKE, (), undo=DROP),
    "snapshot-on-host": _copied(TAKE, ON_HOST, undo=DROP),
    "snapshot-deferred": _copied(TAKE, WAITING, undo=DROP),
    "snapshot-in-guest": _copied(TAKE, IN_GUEST, undo=DROP),
    "snapshot-delete": _removed(DROP, TAKE, ()),
    "group": _copied(GROUP, BOTH, undo=DROP_GROUP),
    "group-delete": _removed(DROP_GROUP, GROUP, BOTH),
    "clone-on-host": _copied(CLONE, ON_HOST, undo=DELETE),
    "clone-in-guest": _copied(CLONE, IN_GUEST, undo=DELETE),
    "restore": _copied(SnapshotLife.restore, (TAKE, SnapshotLife.keep), undo=DELETE),
}


@pytest.fixture
async def life(places: Places, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SnapshotLife]:
    async with started(BlockNode(places, parts=("node", "calls"))) as node:
        volume_id = (await node.co.create("pvc", capability())).volume_id
        node.created[volume_id] = None
        made = SnapshotLife(node, volume_id, places.target("one"))
        await node.enter("handler", node.handler(made.guest))
        _watch(made, monkeypatch)
        yield made


def _watch(life: SnapshotLife, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note of each copy whether its source stood still."""
    take, clone = FileTaking.take, FileMaking.clone

    def taking(self: FileTaking, image: protocol.Image) -> None:
        life.was_still[image.snapshot_id] = False
        began = life.stands_still(image.volume_id)
        take(self, image)
        life.was_still[image.snapshot_id] = began and life.stands_still(image.volume_id)

    def cloning(making: FileMaking, source: volumes.VolumeId, **sizes: int) -> None:
        life.was_still["clone"] = False
        began = life.stands_still(source)
        clone(making, source, **sizes)
        life.was_still["clone"] = began and life.stands_still(source)

    monkeypatch.setattr(FileTaking, "take", taking)
    monkeypatch.setattr(FileMaking, "clone", cloning)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
async def test_failed_call_at_a_copy_is_no_wrong_copy(
    step: Step[SnapshotLife], life: SnapshotLife
) -> None:
    first = [*STEPS.values()].index(step)
    calls = (*lies.CALLS, *lies.CHANGES)
    wrong = await wrong_answers(step, life, lied(life, step, os.getpid(), first=first, calls=calls))
    await life.release()
    await life.node.restart("node")  # it removes what a failed removal has left
    assert wrong == []
