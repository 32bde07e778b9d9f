"""Capacity is provisioned once, and no byte of it is promised twice."""

import asyncio
import dataclasses
import shutil
from pathlib import Path

import pytest

from crust.blockdriver.controller import create_volume
from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.protocol import PoolSpace
from crust.blockdriver.records import capacity
from crust.blockdriver.records.models import VolumeRecord
from crust.core import errors, volumes
from crust.host.answers import NotSeen
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import MIB
from tests.support.drivers.memory_backend import POOL_BYTES, MemoryBackend
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
    assert len(state.stores.volume_records.ids()) == 4
    provisioner.delete(made[0].volume_id)
    assert provisioner.stores.capacity.available_bytes() == wanted


async def test_capacity_does_not_count_written_bytes_twice(
    state: Driver, provisioner: Provisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    await provisioner.create(sized("a", 4 * GIB))
    assert provisioner.stores.capacity.available_bytes() == POOL_BYTES - 4 * GIB
    space = state.stores.provisioning.space()
    written = dataclasses.replace(space, free_bytes=space.free_bytes - 3 * GIB)
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
        state.stores.volume_records.index, state.stores.provisioning, overcommit
    )

    def free(**space: int) -> int:
        reported = PoolSpace(
            **{"size_bytes": size, "free_bytes": size, "snapshot_bytes": 0, "spare_bytes": spare}
            | space
        )
        monkeypatch.setattr(state.stores.provisioning, "space", lambda: reported)
        return pool.available_bytes()

    assert free() == size - spare
    assert free(free_bytes=spare + MIB) == MIB
    assert free(free_bytes=spare - MIB) == 0
    with raised("OutOfCapacity"), pool.set_aside("a copy", MIB):
        pass


def test_capacity_counts_snapshot_blocks_and_reservations(
    state: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = state.stores.capacity
    space = dataclasses.replace(state.stores.provisioning.space(), snapshot_bytes=2 * GIB)
    monkeypatch.setattr(state.stores.provisioning, "space", lambda: space)
    assert pool.available_bytes() == POOL_BYTES - 2 * GIB
    with pool.set_aside("a copy", GIB):
        assert pool.available_bytes() == POOL_BYTES - 3 * GIB
    assert pool.available_bytes() == POOL_BYTES - 2 * GIB


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
