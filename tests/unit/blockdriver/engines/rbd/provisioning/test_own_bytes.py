"""What a pool of Ceph can still promise, beside other namespaces and programs."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.provisioning import engine as rbd_engine
from crust.blockdriver.engines.rbd.provisioning import own_bytes
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.blockdriver.engines.rbd.provisioning.own_bytes import Held, OwnBytes
from crust.blockdriver.engines.rbd.provisioning.snapshot_bytes import SnapshotBytes
from crust.blockdriver.records.capacity import PoolCapacity
from crust.blockdriver.records.models import Summary
from crust.blockdriver.records.records import Index
from crust.core import volumes
from tests.support.raised import raised

GIB = 1 << 30
MINE = volumes.VolumeId("mine")


class Pool:
    """A pool of Ceph with numbers for bytes: 60 GiB of others, and 40 GiB free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.volumes: dict[str, int] = {}
        self.others_bytes, self.free_bytes = 60 * GIB, 40 * GIB
        self.snapshot_bytes = 0
        self.place = Namespace(lambda _: self, "kube", "mine")  # type: ignore[arg-type, return-value]
        monkeypatch.setattr(rbd_engine, "_FRESH_S", 0.0)
        self.now_s = 0.0
        monkeypatch.setattr(own_bytes, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(
            SnapshotBytes, "images", lambda _: dict(zip(self.volumes, self.volumes, strict=True))
        )
        monkeypatch.setattr(SnapshotBytes, "look", lambda *_: None)
        monkeypatch.setattr(SnapshotBytes, "total", lambda _: self.snapshot_bytes)
        monkeypatch.setattr(OwnBytes, "_held", lambda _, image_id, __: self.held(image_id))
        self.engine = RbdProvisioning(self.place)
        self.engine.own_bytes._volume_ids = lambda: self.volumes
        self.index = Index()
        self.capacity = PoolCapacity(self.index, self.engine, 1.0, 10, _reserves_snapshots=True)

    def command(self, prefix: str, **_: Any) -> str:
        """`ceph df`."""
        assert prefix == "df"
        stored = self.others_bytes + sum(self.volumes.values())
        stats = {"stored": stored, "max_avail": self.free_bytes}
        return json.dumps({"pools": [{"name": "kube", "stats": stats}]})

    def held(self, volume_id: str) -> Held:
        """What a look sees."""
        return Held({volume_id: self.volumes[volume_id]})

    def look(self) -> None:
        """Look, and wait until the statistics are as new."""
        self.engine.own_bytes.look()
        self.now_s += own_bytes.STATISTICS_S

    def create(self, volume_id: str, size_bytes: int) -> None:
        with self.capacity.reserved(volume_id, size_bytes, kind="thin"):
            self.volumes[volume_id] = 0
        self.index.note(volume_id, Summary(capacity_bytes=size_bytes))

    def write(self, volume_id: str, size_bytes: int) -> None:
        self.volumes[volume_id] += size_bytes
        self.free_bytes -= size_bytes


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    return Pool(monkeypatch)


def test_other_namespaces_bytes_are_not_promised(pool: Pool) -> None:
    for number in range(4):
        pool.create(f"v{number}", 10 * GIB)
    with raised("OutOfCapacity"):
        pool.create("one more", GIB)


def test_written_bytes_of_volumes_count_once_after_a_look(pool: Pool) -> None:
    pool.create(MINE, 20 * GIB)
    pool.write(MINE, 15 * GIB)
    assert pool.capacity.available_bytes() == 5 * GIB, "others may have written it"
    assert pool.capacity.missing_bytes == 0
    pool.look()
    assert pool.capacity.available_bytes() == 20 * GIB
    pool.others_bytes, pool.free_bytes = 70 * GIB, 15 * GIB
    assert pool.capacity.available_bytes() == 10 * GIB
    pool.others_bytes, pool.free_bytes = 81 * GIB, 4 * GIB
    assert (pool.capacity.available_bytes(), pool.capacity.missing_bytes) == (0, 0)
    pool.look()
    assert (pool.capacity.available_bytes(), pool.capacity.missing_bytes) == (0, GIB)


def test_bytes_count_as_own_only_when_the_statistics_have_them(pool: Pool) -> None:
    """A look that is newer than the statistics would promise them twice: they are free there."""
    pool.create(MINE, 20 * GIB)
    pool.write(MINE, 5 * GIB)
    pool.look()
    pool.volumes[MINE] += 10 * GIB
    pool.others_bytes -= 10 * GIB  # what is stored is as before
    pool.engine.own_bytes.look()
    pool.engine.own_bytes.look()
    assert pool.capacity.available_bytes() == 20 * GIB
    pool.others_bytes += 10 * GIB
    pool.free_bytes -= 10 * GIB
    assert pool.capacity.available_bytes() == 10 * GIB
    pool.now_s += own_bytes.STATISTICS_S
    assert pool.capacity.available_bytes() == 20 * GIB


def test_discarded_bytes_are_not_promised_twice(pool: Pool) -> None:
    pool.create(MINE, 20 * GIB)
    pool.write(MINE, 20 * GIB)
    pool.look()
    pool.write(MINE, -20 * GIB)
    assert pool.capacity.available_bytes() == 20 * GIB
    pool.look()
    assert pool.capacity.available_bytes() == 20 * GIB


def test_removed_volume_is_not_counted_by_a_running_look(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are in the trash, and not free yet."""
    pool.create(MINE, 20 * GIB)
    pool.write(MINE, 20 * GIB)
    own = pool.engine.own_bytes
    pool.look()

    def removed_meanwhile(volume_id: str) -> Held:
        own.forget(volume_id)
        pool.index.note(volume_id, None)
        return Held({volume_id: 20 * GIB})

    monkeypatch.setattr(pool, "held", removed_meanwhile)
    pool.look()
    assert own.least_bytes(80 * GIB) == 0
    assert pool.capacity.available_bytes() == 20 * GIB


def test_snapshot_keeps_what_it_adds_from_every_volume(pool: Pool) -> None:
    """Before its volume writes over it, and after."""
    pool.create(MINE, 10 * GIB)
    pool.write(MINE, 10 * GIB)
    pool.look()
    pool.snapshot_bytes = 10 * GIB
    assert pool.capacity.available_bytes() == 20 * GIB
    pool.free_bytes -= 10 * GIB
    pool.volumes["of the snapshot"] = 10 * GIB
    pool.look()
    assert (pool.capacity.available_bytes(), pool.capacity.missing_bytes) == (20 * GIB, 0)
