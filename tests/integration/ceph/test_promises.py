"""A promise in a Ceph pool is a reservation: at any moment each volume can be written full, beside images of others.

Each life is a random sequence of what changes a pool's space, in a pool with a quota; `SEEDS` is the number of lives.
Others are a second namespace of the pool. The statistics are a few seconds old, so what others write counts for a
test when they have it.
"""

import itertools
import json
import os
import random
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import rbd

from crust.blockdriver.controller.create_volume import Create
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.rbd.provisioning import engine as rbd_engine
from crust.blockdriver.engines.rbd.provisioning import own_bytes
from crust.blockdriver.engines.rbd.provisioning.background import RepeatedWork
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.blockdriver.snapshots.content_source import SourceRequest
from crust.core import volumes
from crust.core.errors import Exhausted
from examples.cluster.ceph_cluster import CephCluster
from tests.support.ceph.rbd_controllers import RAW, Controllers
from tests.support.raised import raised

SEEDS = range(int(os.environ.get("SEEDS", "2")))
STEPS = 30
MIB = 1 << 20
QUOTA = 96 * MIB
METADATA_BYTES = 2 * MIB
"""Of images and records, at most, which the driver does not know before they are there."""
DATA = random.Random(0).randbytes(QUOTA)


@pytest.fixture(scope="module")
def marks(ceph: CephCluster) -> str:
    """A pool whose objects are counted, in statistics that are not older than a second."""
    ceph.command("config set", who="osd", name="mgr_stats_period", value="1")
    ceph.command("config set", who="mgr", name="mgr_tick_period", value="1")
    ceph.command("config set", who="mon", name="mon_mgr_digest_period", value="1")
    name = f"marks-{uuid.uuid4().hex[:8]}"
    ceph.make_pool(name)
    return name


class Tight:
    """A pool with a quota, whose controller looks at it when a test says so, a guest and another namespace."""

    def __init__(self, ceph: CephCluster, base: Path, marks: str) -> None:
        self.ceph, self.marks, self.pool = ceph, marks, f"tight-{uuid.uuid4().hex[:8]}"
        ceph.make_pool(self.pool)
        ceph.command("osd pool set-quota", pool=self.pool, field="max_bytes", val=str(QUOTA))
        ceph.wait_for_statistics(self.pool)
        self.controllers = Controllers(ceph, base, self.pool)
        self.others = ceph.make_namespace(pool=self.pool)
        self.driver = self.start()

    def start(self, **settings: Any) -> Driver:
        """The next controller."""
        self.driver = self.controllers.start(**settings)
        return self.driver

    @property
    def provisioning(self) -> RbdProvisioning:
        found = self.driver.stores.engine.provisioning
        assert isinstance(found, RbdProvisioning)
        return found

    def free_bytes(self) -> int:
        return self.driver.stores.capacity.available_bytes()

    async def create(
        self, name: str, size: int, source: SourceRequest | None = None
    ) -> tuple[str, int]:
        """The id and the size of a new volume."""
        request = Create(name, volumes.CapacityRange(size, 0), RAW, source=source)
        made = await self.driver.controller.provisioner.create(request)
        return made.volume_id, made.capacity_bytes

    async def snapshot(self, name: str, volume: str) -> str:
        taken = await self.driver.controller.snapshots.create(name, volumes.VolumeId(volume))
        return taken.set_id

    def write(self, volume: str, start: int, end: int) -> None:
        """As a guest. A write to a full pool has no answer."""
        with self.controllers.image(volume) as image:
            image.write(DATA[: end - start], start)
            image.flush()

    def settle(self) -> None:
        """Wait until the statistics have all that is written, by an object that is written after it; then look."""
        with self.ceph.ioctx(self.marks) as ioctx:
            ioctx.write_full(uuid.uuid4().hex, b"")
            number = sum(1 for _ in ioctx.list_objects())
        while self._statistics(self.marks)["objects"] != number:
            pass
        self.provisioning.background.look()
        self.provisioning.own_bytes.look()

    def stored_bytes(self) -> int:
        return int(self._statistics(self.pool)["stored"])

    def _statistics(self, pool: str) -> dict[str, Any]:
        answer = json.loads(self.ceph.command("df", detail="detail", format="json"))
        (stats,) = (row["stats"] for row in answer["pools"] if row["name"] == pool)
        return dict(stats)

    @contextmanager
    def others_have(self, size: int) -> Iterator[None]:
        """While the block runs."""
        with self.ceph.ioctx(self.pool, self.others) as ioctx:
            rbd.RBD().create(ioctx, "theirs", size, old_format=False, features=61)
            with rbd.Image(ioctx, "theirs") as image:
                image.write(DATA[:size], 0)
            self.settle()
            yield
            rbd.RBD().remove(ioctx, "theirs")


@pytest.fixture
def tight(
    ceph: CephCluster, tmp_path: Path, marks: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Tight]:
    monkeypatch.setattr(rbd_engine, "_FRESH_S", 0.0)
    monkeypatch.setattr(own_bytes, "STATISTICS_S", 0.0)  # `settle` waits for them
    monkeypatch.setattr(RepeatedWork, "start", lambda _: None)
    made = Tight(ceph, tmp_path, marks)
    yield made
    made.controllers.end()
    ceph.delete_pool(made.pool)


async def test_snapshot_beyond_free_capacity_of_ceph_pool_is_refused(
    tight: Tight,
) -> None:
    volume, size = await tight.create("a", 48 * MIB)
    tight.write(volume, 0, size)
    tight.settle()
    with raised("OutOfCapacity"):
        await tight.snapshot("no", volume)
    assert tight.provisioning.snapshot_ids() == frozenset()
    with raised("OutOfCapacity"):
        await tight.create("clone", size, SourceRequest("volume", volumes.VolumeId(volume)))
    tight.start(reserve_snapshots=False)
    await tight.snapshot("always", volume)
    assert tight.free_bytes() == 0


async def test_snapshot_sets_aside_what_its_source_can_write_over(tight: Tight) -> None:
    volume, size = await tight.create("a", 40 * MIB)
    tight.write(volume, 0, 24 * MIB)
    tight.settle()
    before = tight.free_bytes()
    snapshot = await tight.snapshot("s", volume)
    assert before - tight.free_bytes() == 24 * MIB
    assert tight.start().stores.provisioning.space().snapshot_bytes == 24 * MIB, "by a successor"
    tight.write(volume, 0, size)
    tight.settle()
    assert before - tight.free_bytes() == 24 * MIB, "it has them now"
    assert tight.driver.stores.capacity.missing_bytes == 0
    tight.driver.controller.snapshots.delete(snapshot)
    while tight.stored_bytes() > size + METADATA_BYTES:  # OSDs free it in the background
        tight.settle()
    tight.settle()
    assert tight.free_bytes() >= before - MIB


class Life:
    """A pool, its volumes and snapshots, by chance."""

    def __init__(self, tight: Tight, seed: int) -> None:
        self.tight = tight
        self.chance = random.Random(seed)
        self.names = map(str, itertools.count())
        self.volumes: dict[str, int] = {}
        self.snapshots: list[str] = []
        self.told: list[str] = []

    async def step(self) -> None:
        """Do one thing. The driver may refuse it for want of capacity."""
        kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (3, self.create), (1, self.clone), (1, self.restore), (4, self.snapshot), (1, self.delete_volume),
            (1, self.delete_snapshot), (1, self.restart), (6, self.write), (1, self.discard), (1, self.settle),
        ]  # fmt: skip
        (act,) = self.chance.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        try:
            await act()
        except Exhausted as err:
            if err.error_name != "OutOfCapacity":
                raise
            self.told.append(f"{act.__name__} refused")

    async def create(self) -> None:
        await self.made(self.chance.randrange(1, 24) * MIB)

    async def clone(self) -> None:
        if self.volumes:
            source = self.chance.choice(list(self.volumes))
            await self.made(self.volumes[source], SourceRequest("volume", volumes.VolumeId(source)))

    async def restore(self) -> None:
        if self.snapshots:
            await self.made(0, SourceRequest("snapshot", self.chance.choice(self.snapshots)))

    async def made(self, size: int, source: SourceRequest | None = None) -> None:
        volume, size = await self.tight.create(next(self.names), size, source)
        self.volumes[volume] = size
        self.told.append(f"made {volume[-4:]} of {size // MIB} {source}")

    async def snapshot(self) -> None:
        if self.volumes:
            volume = self.chance.choice(list(self.volumes))
            self.snapshots.append(await self.tight.snapshot(next(self.names), volume))
            self.told.append(f"snapshot of {volume[-4:]}")

    async def delete_volume(self) -> None:
        if self.volumes:
            volume = self.chance.choice(list(self.volumes))
            self.tight.driver.controller.provisioner.delete(volumes.VolumeId(volume))
            del self.volumes[volume]
            self.told.append(f"deleted {volume[-4:]}")

    async def delete_snapshot(self) -> None:
        if self.snapshots:
            snapshot = self.snapshots.pop(self.chance.randrange(len(self.snapshots)))
            self.tight.driver.controller.snapshots.delete(snapshot)
            self.told.append(f"deleted snapshot {snapshot[-4:]}")

    async def restart(self) -> None:
        self.tight.start()
        self.told.append("restart")

    async def write(self) -> None:
        if self.volumes:
            volume, size = self.chance.choice(list(self.volumes.items()))
            start = self.chance.choice((0, self.chance.randrange(size // 4096) * 4096))
            end = self.chance.choice((start + 4096, self.chance.randrange(start, size) + 1, size))
            self.tight.write(volume, start, end)
            self.told.append(f"written {volume[-4:]} from {start} to {end}")

    async def discard(self) -> None:
        if self.volumes:
            volume, size = self.chance.choice(list(self.volumes.items()))
            start = self.chance.randrange(size)
            with self.tight.controllers.image(volume) as image:
                image.discard(start, self.chance.randrange(start, size) + 1 - start)
            self.told.append(f"discarded {volume[-4:]}")

    async def settle(self) -> None:
        self.tight.settle()
        self.told.append(f"settled, {self.tight.free_bytes() // MIB} free")

    async def fill(self) -> None:
        """Write all of each volume."""
        for volume, size in self.chance.sample(list(self.volumes.items()), len(self.volumes)):
            self.tight.write(volume, 0, size)


@pytest.mark.parametrize("seed", SEEDS)
async def test_each_volume_of_a_random_life_can_be_filled(tight: Tight, seed: int) -> None:
    life = Life(tight, seed)
    with tight.others_have(METADATA_BYTES):
        for _ in range(STEPS):
            await life.step()
        await life.settle()
        if rest := tight.free_bytes():
            await life.made(rest)
    try:
        await life.fill()
    except rbd.Error as err:
        pytest.fail(f"{err}: {life.told}")
    tight.settle()
    assert tight.stored_bytes() <= QUOTA, life.told
