"""kill -9, and a full disk, before every system call of a snapshot, a group, a restore and a clone.

A freeze costs grace periods of the kernel, tenths of a second, so volumes that are mounted are cut short only while
something is frozen or about to be; at all other points they are not mounted, and nothing is frozen.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.snapshots.freezer import Member
from crust.core import errors
from crust.host.block import signatures
from tests.support.drivers.block_driver import Bench
from tests.support.drivers.pools import bench_on
from tests.support.faults.crashes import at_call, crash_points, failure_points
from tests.support.frozen import is_frozen
from tests.support.records import pool_layout
from tests.support.records.copies import down, made_of, up, write

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

DATA = b"every byte" * 1000


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """No sync: thousands are made here, and none has to survive a power cut."""
    with tempfile.TemporaryDirectory(prefix="crust-", dir="/dev/shm") as name:
        yield Path(name)


class Scene:
    """Two volumes with data, mounted or not, and what may be left of copying them."""

    def __init__(self, bench: Bench, *, mounted: bool) -> None:
        self.bench = bench
        self.mounted = mounted
        self.volumes: list[str] = []
        self.targets: list[str] = []

    async def set(self) -> None:
        """Bring the volumes up, and down again if they are not to be mounted."""
        for name in ("one", "two"):
            volume = await self.bench.create(name)
            target = await up(self.bench, volume.volume_id)
            write(target, "file", DATA)
            self.volumes.append(volume.volume_id)
            if self.mounted:
                self.targets.append(target)
            else:
                await down(self.bench, volume.volume_id)

    async def clear(self) -> None:
        for volume_id in self.volumes:
            await down(self.bench, volume_id)

    def window(self, act: Callable[["Scene"], Coroutine[Any, Any, None]]) -> range:
        """The calls of `act` from before the first freeze to after the last thaw, when it runs undisturbed."""
        self.bench.restart()
        freezer = self.bench.driver.controller.snapshots.freezer
        frozen, marks = freezer.frozen, []

        @asynccontextmanager
        async def marked(members: Sequence[Member]) -> AsyncIterator[None]:
            marks.append(count())
            async with frozen(members):
                yield
            marks.append(count())

        with at_call(-1, lambda _: None) as count, pytest.MonkeyPatch.context() as patched:
            patched.setattr(freezer, "frozen", marked)
            asyncio.run(act(self))
        assert marks[-1] - marks[0] > 5
        return range(marks[0], marks[-1] + 1)

    def points(self, act: Callable[["Scene"], Coroutine[Any, Any, None]]) -> range:
        """Where to cut `act` short."""
        return self.window(act) if self.mounted else range(1000)

    async def take(self) -> None:
        """A snapshot, restored and removed again."""
        taken = await self.bench.co.snapshot(self.volumes[0])
        restored = await made_of(self.bench, "restored", snapshot_id=taken.snapshot_id)
        await self.look_into(restored.volume_id)
        await self.bench.delete(restored.volume_id)
        await self.bench.co.delete_snapshot(taken.snapshot_id)

    async def take_group(self) -> None:
        taken = await self.bench.co.group(*self.volumes)
        await self.bench.co.delete_group(taken)

    async def clone(self) -> None:
        clone = await made_of(self.bench, "clone", volume_id=self.volumes[1])
        await self.look_into(clone.volume_id)
        await self.bench.delete(clone.volume_id)

    async def look_into(self, volume_id: str) -> None:
        """By its superblock: mounting at every point would take minutes."""
        image = pool_layout.image(self.bench.root / "state", volume_id)
        assert isinstance(signatures.probe(str(image)), signatures.Filesystem)

    def check(self) -> None:
        """Nothing is left frozen, temporary or incomplete."""
        assert not any(is_frozen(target) for target in self.targets)
        pool = self.bench.root / "state"
        assert pool_layout.files(pool) == pool_layout.files_of(pool, self.volumes)
        assert list((self.bench.root / "run" / "freezes").iterdir()) == []


ACTS: dict[str, Callable[[Scene], Coroutine[Any, Any, None]]] = {
    "snapshot": Scene.take,
    "group": Scene.take_group,
    "clone": Scene.clone,
}


@pytest.fixture(params=[False, True], ids=["idle", "mounted"])
def mounted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("pool_type", "is_killed"), [("ext4", True), ("xfs", False)])
def test_copy_killed_or_on_a_full_disk_leaves_nothing_frozen(
    in_memory: Path, pool_type: str, act: str, *, is_killed: bool, mounted: bool
) -> None:
    with bench_on(pool_type, in_memory) as bench:
        scene, points = Scene(bench, mounted=mounted), 0
        asyncio.run(scene.set())
        cuts: Any = crash_points if is_killed else failure_points
        for cut in cuts(
            lambda _: bench.restart(),
            lambda _: asyncio.run(ACTS[act](scene)),
            within=scene.points(ACTS[act]),
        ):
            if is_killed:
                bench.restart()
            else:
                assert isinstance(cut[1], errors.CrustError), cut
            assert not any(is_frozen(target) for target in scene.targets)
            asyncio.run(ACTS[act](scene))
            if is_killed:
                scene.check()
            points += 1
        bench.restart()
        scene.check()
        assert points > (5 if mounted else 20)
        asyncio.run(scene.clear())
