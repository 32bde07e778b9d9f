"""kill -9, and a full disk, before every system call of a snapshot, a group, a restore and a clone."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from crust import errors
from crust.host import filesystems
from crust.wire.csi.v1 import csi_pb2
from tests.integration.blockdriver.test_snapshots import (
    down,
    drop,
    group,
    is_frozen,
    made_of,
    snapshot,
    up,
    write,
)
from tests.support.block_driver import Bench, caller
from tests.support.crashes import crash_points, failure_points
from tests.support.pools import bench_on

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

DATA = b"every byte" * 1000


@pytest.fixture
def copying(tmp_path: Path) -> Iterator[Bench]:
    with bench_on("ext4", tmp_path) as bench:
        yield bench


@pytest.fixture
def cloning(tmp_path: Path) -> Iterator[Bench]:
    with bench_on("xfs", tmp_path) as bench:
        yield bench


class Scene:
    """Two mounted volumes with data, and what may be left of copying them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.volumes: list[str] = []
        self.targets: list[str] = []

    async def set(self) -> None:
        """Bring the volumes up."""
        for name in ("one", "two"):
            volume = await self.bench.create(name)
            target = await up(self.bench, volume.volume_id)
            write(target, "file", DATA)
            self.volumes.append(volume.volume_id)
            self.targets.append(target)

    async def take(self) -> None:
        """A snapshot, restored and removed again."""
        taken = await snapshot(self.bench, self.volumes[0])
        restored = await made_of(self.bench, "restored", snapshot_id=taken.snapshot_id)
        await self.look_into(restored.volume_id)
        await self.bench.delete(restored.volume_id)
        await drop(self.bench, taken.snapshot_id)

    async def take_group(self) -> None:
        """A group, removed again."""
        taken = await group(self.bench, *self.volumes)
        request = csi_pb2.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=taken.group_snapshot_id,
            snapshot_ids=[each.snapshot_id for each in taken.snapshots],
        )
        await self.bench.driver.group_controller.DeleteVolumeGroupSnapshot(request, caller())

    async def clone(self) -> None:
        """A clone, removed again."""
        clone = await made_of(self.bench, "clone", volume_id=self.volumes[1])
        await self.look_into(clone.volume_id)
        await self.bench.delete(clone.volume_id)

    async def look_into(self, volume_id: str) -> None:
        """By its superblock: mounting at every point would take minutes."""
        image = self.bench.root / "state" / "images" / f"{volume_id}.img"
        assert isinstance(filesystems.probe(str(image)), filesystems.Filesystem)

    def check(self) -> None:
        """Nothing is left frozen, aside, or half made."""
        assert not any(is_frozen(target) for target in self.targets)
        left = {
            path.name
            for folder in ("images", "records", "snapshots", "groups")
            for path in (self.bench.root / "state" / folder).iterdir()
        }
        ours = {f"{each}{suffix}" for each in self.volumes for suffix in (".img", ".json")}
        assert left == ours
        assert list((self.bench.root / "run" / "freezes").iterdir()) == []


ACTS: dict[str, Callable[[Scene], Coroutine[Any, Any, None]]] = {
    "snapshot": Scene.take,
    "group": Scene.take_group,
    "clone": Scene.clone,
}


@pytest.mark.parametrize("act", ACTS)
def test_a_driver_killed_anywhere_leaves_nothing_frozen_and_the_retry_finishes(
    copying: Bench, act: str
) -> None:
    scene = Scene(copying)
    asyncio.run(scene.set())
    points = 0
    for _ in crash_points(lambda _: None, lambda _: asyncio.run(ACTS[act](scene))):
        copying.restart()
        assert not any(is_frozen(target) for target in scene.targets)
        asyncio.run(ACTS[act](scene))
        scene.check()
        points += 1
    copying.restart()
    scene.check()
    assert points > 20
    for volume_id in scene.volumes:
        asyncio.run(down(copying, volume_id))


@pytest.mark.parametrize("act", ACTS)
def test_a_full_disk_anywhere_is_said_and_leaves_nothing_frozen(cloning: Bench, act: str) -> None:
    scene = Scene(cloning)
    asyncio.run(scene.set())
    points = 0
    for _, error in failure_points(lambda _: None, lambda _: asyncio.run(ACTS[act](scene))):
        assert isinstance(error, errors.CrustError), error
        assert not any(is_frozen(target) for target in scene.targets)
        asyncio.run(ACTS[act](scene))
        points += 1
    cloning.restart()
    scene.check()
    assert points > 20
    for volume_id in scene.volumes:
        asyncio.run(down(cloning, volume_id))
