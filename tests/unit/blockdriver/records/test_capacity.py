"""Capacity is provisioned once and reported with its topology; lists survive changes, and report health."""

import asyncio
import dataclasses
import shutil
from pathlib import Path
from typing import ClassVar

import pytest

from crust.blockdriver.controller import (
    class_parameters,
    create_volume,
    modify_volume,
    topology,
)
from crust.blockdriver.controller.create_volume import CapacityQuery, Provisioner
from crust.blockdriver.controller.modify_volume import VolumeModifier
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines import protocol
from crust.blockdriver.engines.protocol import PoolSpace
from crust.blockdriver.records import capacity, models
from crust.blockdriver.records.health import Kind
from crust.blockdriver.records.models import VolumeRecord
from crust.core import errors, operations, volumes
from crust.host.answers import NotSeen
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import MIB, Mode, mount
from tests.support.drivers.memory_backend import POOL_BYTES, MemoryBackend
from tests.support.raised import raised
from tests.support.records import pool_layout

GIB = 1024 * MIB
HERE = topology.segments({topology.KEY: driver_state.NODE})
ELSEWHERE = topology.segments({topology.KEY: "node-2"})


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


def test_get_capacity_depends_on_filesystem_and_topology(provisioner: Provisioner) -> None:
    def ask(
        capability: volumes.VolumeCapability | None = None, place: topology.Segments = ()
    ) -> tuple[int, int, int]:
        return provisioner.available(CapacityQuery((capability,) if capability else (), (), place))

    assert ask() == (POOL_BYTES, POOL_BYTES, MIB)
    assert ask(mount("xfs"), HERE) == (POOL_BYTES, POOL_BYTES, 300 * MIB)
    assert ask(mount(), ELSEWHERE) == (0, 0, 0)
    assert ask(mount(mode=Mode.MULTI_NODE_MULTI_WRITER)) == (0, 0, 0)
    with pytest.raises(errors.InvalidRequest):
        provisioner.available(CapacityQuery((), (("odd", ""),), ()))


def test_create_with_invalid_topology_is_refused() -> None:
    for bad in (
        {},
        {"a/b/c": "x"},
        {"Crust.dev/node": "a", "crust.dev/node": "b"},
        {topology.KEY: ""},
        {topology.KEY: "x" * 64},
        {topology.KEY: "-x"},
        {"n" * 64: "x"},
    ):
        with pytest.raises(topology.InvalidTopology):
            topology.segments(bad)
    with pytest.raises(topology.InvalidTopology):
        topology.requirement((HERE,), (ELSEWHERE,))
    assert topology.segments({"CRUST.dev/Node": driver_state.NODE}) == HERE


@pytest.mark.parametrize("node_id", ["node-1", "x" * 256, "ü", "a/b", "-"])
def test_topology_value_of_any_node_id_is_valid(node_id: str) -> None:
    value = topology.value_of(node_id)
    assert topology.segments({topology.KEY: value}) == ((topology.KEY, value),)


async def test_list_reports_lost_and_damaged_volumes(
    state: Driver, provisioner: Provisioner, tmp_path: Path
) -> None:
    made = [
        (await provisioner.create(sized(f"pvc-{number}", 16 * MIB))).volume_id
        for number in range(4)
    ]
    well, lost, short, unreadable = made
    backend = state.stores.provisioning
    assert isinstance(backend, MemoryBackend)
    del backend.images[lost]
    backend.images[short] = MIB
    pool_layout.volume_record(tmp_path / "state", unreadable).write_text("{")
    orphan = state.stores.pool.ids.volume_id("unrecorded")
    backend.images[orphan] = MIB
    health = {entry.volume_id: entry for entry in state.controller.lister.health_page(0, "")[0]}
    assert {
        key: [finding.reason for finding in entry.findings] for key, entry in health.items()
    } == {
        well: [],
        lost: ["ImageMissing"],
        short: ["ImageDamaged"],
        unreadable: ["RecordUnreadable"],
        orphan: ["RecordMissing"],
    }
    assert health[lost].findings[0].kind is Kind.DATA_LOSS
    for volume_id, size_bytes in ((unreadable, 16 * MIB), (orphan, MIB)):
        assert (
            f"the {size_bytes} bytes of its size stay reserved"
            in health[volume_id].findings[0].message
        )
    listed = {listed.volume_id: listed for listed in state.controller.lister.page(0, "")[0]}
    assert set(listed) == {well, lost, short, unreadable}
    assert not listed[well].health.condition.abnormal
    assert listed[lost].health.condition.abnormal
    assert listed[unreadable].record is None
    with pytest.raises(models.VolumeNotFound):
        state.controller.health_check.examine(state.stores.pool.ids.volume_id("none"))


async def test_pool_health_without_access_or_capacity_is_abnormal(
    state: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    health_check = state.controller.health_check
    assert health_check.pool() == ()
    monkeypatch.setattr(state.stores.provisioning, "space", lambda: protocol.PoolSpace(0, 0, 0))
    assert [condition.reason for condition in health_check.pool()] == ["PoolFull"]

    def unavailable() -> None:
        raise errors.NotReady("the pool is not mounted")

    monkeypatch.setattr(state.stores.provisioning, "check_usable", unavailable)
    assert [condition.reachable for condition in health_check.pool()] == [False]


# Changes of limits that a killed driver had recorded are finished when their guests can be reached.


VOLUME = volumes.VolumeId("vol-1")
OTHER = volumes.VolumeId("vol-2")


class Applications(VolumeModifier):
    """What was applied, and the answers to it: None, or an error."""

    answers: ClassVar[list[errors.CrustError | None]]
    made: ClassVar[list[str]]

    def interrupted(self) -> tuple[volumes.VolumeId, ...]:
        return VOLUME, OTHER

    async def modify(self, volume_id: volumes.VolumeId, changes: class_parameters.Changes) -> None:
        assert changes == ()
        self.made.append(volume_id)
        if answer := self.answers.pop(0):
            raise answer


async def finish(state: Driver, answers: list[errors.CrustError | None]) -> list[str]:
    """The volumes whose changes were tried, in order."""
    Applications.answers, Applications.made = answers, []
    modifier = state.controller.modifier
    await Applications(modifier.stores, modifier.enforcement).finish_interrupted()
    return Applications.made


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modify_volume, "_PAUSES_S", (0.0, 0.0))


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (errors.PeerUnavailable("the handler is absent"), 3),
        (operations.OperationInProgress("vol-1", "NodeStageVolume", 1), 3),
        (errors.NotReady("the handler cannot limit"), 1),
    ],
)
async def test_interrupted_change_is_finished_later(
    state: Driver, error: errors.CrustError, tries: int
) -> None:
    made = await finish(state, [error for _ in range(2 * tries)])
    assert made == [VOLUME, OTHER] * tries


async def test_interrupted_change_is_finished_once_the_guest_is_reachable(state: Driver) -> None:
    absent = errors.PeerUnavailable("the handler is absent")
    assert await finish(state, [absent, None, None]) == [VOLUME, OTHER, VOLUME]
