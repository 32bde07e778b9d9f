"""Capacity is provisioned once, and no byte of it is promised twice."""

import asyncio
import dataclasses
import shutil
from pathlib import Path

import pytest

from crust.blockdriver.controller import create_volume
from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.protocol import Image, PoolSpace
from crust.blockdriver.records import capacity
from crust.blockdriver.records.models import VolumeRecord
from crust.core import errors, volumes
from crust.host.answers import NotSeen
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import MIB
from tests.support.drivers.memory_backend import (
    POOL_BYTES,
    SPARE_BYTES,
    MemoryBackend,
    NewMemorySnapshotSet,
)
from tests.support.raised import raised
from tests.support.records import pool_layout

GIB = 1024 * MIB


def sized(name: str, size_bytes: int) -> create_volume.Create:
    return driver_state.create(name, required=size_bytes)


async def test_create_in_parallel_never_exceeds_the_capacity(
    state: Driver, provisioner: Provisioner
) -> None:
    wanted = POOL_BYTES // 4
    answers = await asyncio.gather(
        *(provisioner.create(sized(f"v{number}", wanted)) for number in range(12)),
        return_exceptions=True,
    )
    made = [answer for answer in answers if isinstance(answer, VolumeRecord)]
    refused = [
        answer
        for answer in answers
        if isinstance(answer, errors.Exhausted) and answer.error_name == "OutOfCapacity"
    ]
    assert (len(made), len(refused)) == (4, 8)
    assert provisioner.stores.capacity.available_bytes() == 0
    assert len(state.stores.volume_records.index.page()) == 4
    provisioner.delete(made[0].volume_id)
    assert provisioner.stores.capacity.available_bytes() == wanted


async def test_others_take_no_byte_that_a_volume_was_promised(
    state: Driver, provisioner: Provisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they write it after the promise: then it is missing, and no other volume gets what is left."""
    await provisioner.create(sized("a", 4 * GIB))
    for used, free in ((POOL_BYTES - 5 * GIB, GIB), (POOL_BYTES - 4 * GIB, 0), (POOL_BYTES, 0)):
        space = dataclasses.replace(
            state.stores.provisioning.space(), free_bytes=POOL_BYTES + SPARE_BYTES - used
        )
        with monkeypatch.context() as patched:
            patched.setattr(state.stores.provisioning, "space", lambda space=space: space)
            assert provisioner.stores.capacity.available_bytes() == free


async def test_capacity_does_not_count_written_bytes_twice(
    state: Driver, provisioner: Provisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    await provisioner.create(sized("a", 4 * GIB))
    assert provisioner.stores.capacity.available_bytes() == POOL_BYTES - 4 * GIB
    space = state.stores.provisioning.space()
    written = dataclasses.replace(
        space, free_bytes=space.free_bytes - 3 * GIB, own_bytes=space.own_bytes + 3 * GIB
    )
    monkeypatch.setattr(state.stores.provisioning, "space", lambda: written)
    assert provisioner.stores.capacity.available_bytes() == POOL_BYTES - 4 * GIB
    await provisioner.create(sized("b", POOL_BYTES - 4 * GIB))
    with raised("OutOfCapacity"):
        await provisioner.create(sized("c", 16 * MIB))


DAMAGES = ("", "{", '{"schema":9}', "\0" * 100, None)


@pytest.mark.parametrize("damage", DAMAGES, ids=["empty", "cut", "later", "zeros", "gone"])
async def test_capacity_keeps_bytes_of_volume_whose_record_is_damaged(
    state: Driver, provisioner: Provisioner, tmp_path: Path, damage: str | None
) -> None:
    """Its pod may still write all of it. What the record says again, or who removes the image, counts at once."""
    backend = state.stores.provisioning
    assert isinstance(backend, MemoryBackend)
    made = await provisioner.create(sized("a", 8 * GIB))
    record = pool_layout.volume_record(tmp_path / "state", made.volume_id)
    if damage is None:
        record.unlink()
    else:
        record.write_text(damage)
    state.stores.pool.let_go()
    again = driver_state.opened(tmp_path, backend=backend).controller.provisioner
    assert again.stores.capacity.available_bytes() == POOL_BYTES - 8 * GIB
    with raised("OutOfCapacity"):
        await again.create(sized("b", 3 * GIB))
    await again.create(sized("b", POOL_BYTES - 8 * GIB))
    del backend.images[made.volume_id]
    shutil.rmtree(pool_layout.directory(tmp_path / "state", made.volume_id))
    assert again.stores.capacity.available_bytes() == 8 * GIB
    if damage is None:
        await again.create(sized("a", 8 * GIB))
        assert again.stores.capacity.available_bytes() == 0


async def test_image_whose_size_is_not_seen_refuses_new_volumes(
    state: Driver, provisioner: Provisioner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither record nor image say how much its pod may still write: no number would be right."""
    made = await provisioner.create(sized("a", 8 * GIB))
    pool_layout.volume_record(tmp_path / "state", made.volume_id).write_text("{")
    state.stores.pool.let_go()
    backend = state.stores.provisioning
    assert isinstance(backend, MemoryBackend)
    again = driver_state.opened(tmp_path, backend=backend)

    def unseen(volume_id: str) -> int:
        raise NotSeen(f"cannot see the image {volume_id}")

    with monkeypatch.context() as patched:
        patched.setattr(backend, "image_bytes", unseen)
        with pytest.raises(NotSeen, match=made.volume_id):
            await again.controller.provisioner.create(sized("b", GIB))
        (finding,) = again.controller.health_check.examine(made.volume_id).findings
        assert "no volume can be created until its size is seen" in finding.message
    await again.controller.provisioner.create(sized("b", GIB))


@pytest.mark.parametrize(
    ("size", "spare"), [(GIB, 64 * MIB), (100 * GIB, GIB)], ids=["64 MiB", "1 %"]
)
@pytest.mark.parametrize("overcommit", [1.0, 3.0])
def test_capacity_never_gives_the_spare(
    state: Driver, monkeypatch: pytest.MonkeyPatch, size: int, spare: int, overcommit: float
) -> None:
    pool = capacity.PoolCapacity(
        state.stores.volume_records.index,
        state.stores.provisioning,
        overcommit,
        10,
        _reserves_snapshots=True,
    )

    def free(**space: int) -> int:
        reported = PoolSpace(**{"free_bytes": size, "spare_bytes": spare} | space)
        monkeypatch.setattr(state.stores.provisioning, "space", lambda: reported)
        return pool.available_bytes()

    assert free() == size - spare
    assert free(free_bytes=spare + MIB) == MIB
    assert free(free_bytes=spare - MIB) == 0


def backend_of(state: Driver) -> MemoryBackend:
    backend = state.stores.provisioning
    assert isinstance(backend, MemoryBackend)
    return backend


def test_capacity_counts_snapshot_blocks_and_reservations(
    state: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = state.stores.capacity
    backend_of(state).allocated_now = {"a": GIB // 2, "b": GIB // 2}
    ids = [volumes.VolumeId("a"), volumes.VolumeId("b")]
    space = dataclasses.replace(state.stores.provisioning.space(), snapshot_bytes=2 * GIB)
    monkeypatch.setattr(state.stores.provisioning, "space", lambda: space)
    assert pool.available_bytes() == POOL_BYTES - 2 * GIB
    with pool.set_aside("a set", ids):
        assert pool.available_bytes() == POOL_BYTES - 3 * GIB
        pool.check_taken("a set", ids, 2 * GIB)
        assert pool.available_bytes() == POOL_BYTES - 4 * GIB
    assert pool.available_bytes() == POOL_BYTES - 2 * GIB


def snapshots_of(state: Driver) -> int:
    return len(state.stores.snapshot_sets.index.page())


@pytest.mark.parametrize("later", [0, GIB], ids=["written before", "written during the copy"])
async def test_snapshot_without_capacity_to_overwrite_its_source_is_refused(
    state: Driver, provisioner: Provisioner, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await provisioner.create(sized("a", POOL_BYTES - 3 * GIB))
    snapshots, allocated = state.controller.snapshots, backend_of(state).allocated_now
    take = NewMemorySnapshotSet.take

    def taking(self: NewMemorySnapshotSet, image: Image) -> None:
        allocated[made.volume_id] += later
        take(self, image)

    monkeypatch.setattr(NewMemorySnapshotSet, "take", taking)
    allocated[made.volume_id] = 3 * GIB - later
    await snapshots.create("fits", made.volume_id)
    allocated[made.volume_id] = 3 * GIB - later + MIB
    with raised("OutOfCapacity"):
        await snapshots.create("does not", made.volume_id)
    assert snapshots_of(state) == 1
    assert state.stores.capacity.available_bytes() == 3 * GIB


def kind(name: str, size_bytes: int, provisioning: str) -> create_volume.Create:
    parameters = (("crust.dev/provisioning", provisioning),)
    return dataclasses.replace(sized(name, size_bytes), parameters=parameters)


async def test_thick_volume_is_never_overcommitted(tmp_path: Path) -> None:
    state = driver_state.opened(tmp_path, overcommit=2.0)
    provisioner, pool = state.controller.provisioner, state.stores.capacity
    await provisioner.create(kind("thick", 4 * GIB, "thick"))
    assert pool.available_bytes(thick=True) == 6 * GIB
    await provisioner.create(kind("thin", 8 * GIB, "thin"))
    assert (pool.available_bytes(thick=True), pool.available_bytes()) == (2 * GIB, 4 * GIB)
    with raised("OutOfCapacity"):
        await provisioner.create(kind("too large", 2 * GIB + MIB, "thick"))
    await provisioner.create(kind("fits", 2 * GIB, "thick"))
    with raised("OutOfCapacity"):
        await provisioner.create(kind("none left", 16 * MIB, "thin"))


async def test_overcommitted_pool_reserves_snapshots_of_thick_volumes(tmp_path: Path) -> None:
    state = driver_state.opened(tmp_path, overcommit=2.0)
    made = await state.controller.provisioner.create(kind("a", 6 * GIB, "thick"))
    allocated, snapshots = backend_of(state).allocated_now, state.controller.snapshots
    allocated[made.volume_id] = 4 * GIB + MIB
    with raised("OutOfCapacity"):
        await snapshots.create("s", made.volume_id)
    allocated[made.volume_id] = 4 * GIB
    await snapshots.create("s", made.volume_id)


async def test_volume_keeps_its_kind_when_the_default_changes(tmp_path: Path) -> None:
    backend = MemoryBackend()
    state = driver_state.opened(tmp_path, backend=backend, thick=True)
    made = await state.controller.provisioner.create(sized("a", GIB))
    assert made.thick
    state.stores.pool.let_go()
    again = driver_state.opened(tmp_path, backend=backend, thick=False)
    assert (await again.controller.provisioner.create(sized("a", GIB))).thick
    assert not (await again.controller.provisioner.create(sized("b", GIB))).thick


async def test_thick_volume_is_refused_where_its_blocks_do_not_stay(
    state: Driver, provisioner: Provisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state.stores.provisioning, "thick_obstacle", lambda: "it is btrfs")
    with raised("ThickNotPossible"):
        await provisioner.create(kind("a", GIB, "thick"))
    sent = (("crust.dev/provisioning", "thick"),)
    assert provisioner.available((), sent, ()) == (0, 0, 0)
    assert (await provisioner.create(kind("a", GIB, "thin"))).thick is False


@pytest.mark.parametrize(
    ("overcommit", "reserves"), [(1.0, False), (1.5, True)], ids=["not reserved", "overcommit"]
)
async def test_snapshot_without_a_promise_to_its_source_needs_no_capacity(
    tmp_path: Path, overcommit: float, *, reserves: bool
) -> None:
    state = driver_state.opened(tmp_path, overcommit=overcommit, reserve_snapshots=reserves)
    made = await state.controller.provisioner.create(sized("a", POOL_BYTES))
    backend_of(state).allocated_now[made.volume_id] = POOL_BYTES
    await state.controller.snapshots.create("s", made.volume_id)
    assert snapshots_of(state) == 1


async def test_expand_reserves_the_difference_and_changes_nothing_if_refused(
    state: Driver, provisioner: Provisioner
) -> None:
    made = await provisioner.create(sized("a", 6 * GIB))
    with raised("OutOfCapacity"):
        driver_state.expand(state, made.volume_id, volumes.CapacityRange(POOL_BYTES + MIB), None)
    assert state.stores.volume_records.load(made.volume_id).capacity_bytes == 6 * GIB
    grown = driver_state.expand(state, made.volume_id, volumes.CapacityRange(POOL_BYTES), None)
    assert grown == (POOL_BYTES, True)


async def test_overcommit_exceeds_the_pool_but_not_with_one_volume(tmp_path: Path) -> None:
    state = driver_state.opened(tmp_path, overcommit=2.0)
    provisioner = state.controller.provisioner
    with raised("OutOfCapacity"):
        await provisioner.create(sized("whole", POOL_BYTES + MIB))
    for name in ("a", "b"):
        await provisioner.create(sized(name, POOL_BYTES))
    with raised("OutOfCapacity"):
        await provisioner.create(sized("c", 16 * MIB))


async def test_capacity_counts_provisioned_volumes_after_a_restart(
    state: Driver, provisioner: Provisioner, tmp_path: Path
) -> None:
    await provisioner.create(sized("a", 9 * GIB))
    backend = state.stores.provisioning
    assert isinstance(backend, MemoryBackend)
    again = driver_state.opened(tmp_path, backend=backend).controller.provisioner
    assert again.stores.capacity.available_bytes() == POOL_BYTES - 9 * GIB
