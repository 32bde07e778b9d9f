"""Lists that survive changes, and the health that they report."""

from pathlib import Path
from typing import ClassVar

import pytest

from crust.blockdriver.controller import class_parameters, list_volumes, modify_volume
from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.controller.list_volumes import VolumeLister
from crust.blockdriver.controller.modify_volume import VolumeModifier
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines import protocol
from crust.blockdriver.records import models
from crust.blockdriver.records.health import HealthCheck, Kind
from crust.core import errors, operations, volumes
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import MIB
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.records import pool_layout


@pytest.fixture
def health_check(state: Driver) -> HealthCheck:
    return state.controller.health_check


@pytest.fixture
def lister(state: Driver) -> VolumeLister:
    return state.controller.lister


async def volumes_made(provisioner: Provisioner, count: int) -> list[volumes.VolumeId]:
    size = 16 * MIB
    made = [
        await provisioner.create(driver_state.create(f"pvc-{number}", required=size))
        for number in range(count)
    ]
    return sorted(volume.volume_id for volume in made)


def ids(page: tuple[list_volumes.Listed, ...]) -> list[str]:
    return [listed.volume_id for listed in page]


async def test_list_reports_lost_and_damaged_volumes(
    state: Driver,
    provisioner: Provisioner,
    lister: VolumeLister,
    health_check: HealthCheck,
    tmp_path: Path,
) -> None:
    well, lost, short, unreadable = await volumes_made(provisioner, 4)
    backend = state.stores.provisioning
    assert isinstance(backend, MemoryBackend)
    del backend.images[lost]
    backend.images[short] = MIB
    pool_layout.volume_record(tmp_path / "state", unreadable).write_text("{")
    orphan = state.stores.pool.ids.volume_id("unrecorded")
    backend.images[orphan] = MIB
    health = {entry.volume_id: entry for entry in lister.health_page(0, "")[0]}
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
    listed = {listed.volume_id: listed for listed in lister.page(0, "")[0]}
    assert set(listed) == {well, lost, short, unreadable}
    assert not listed[well].health.condition.abnormal
    assert listed[lost].health.condition.abnormal
    assert listed[unreadable].record is None
    with pytest.raises(models.VolumeNotFound):
        health_check.examine(state.stores.pool.ids.volume_id("none"))


async def test_pool_health_without_access_or_capacity_is_abnormal(
    state: Driver,
    provisioner: Provisioner,
    health_check: HealthCheck,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert health_check.pool() == ()
    monkeypatch.setattr(state.stores.provisioning, "space", lambda: protocol.PoolSpace(0, 0, 0))
    assert [condition.reason for condition in health_check.pool()] == ["PoolFull"]

    def unavailable() -> None:
        raise errors.NotReady("the pool is not mounted")

    monkeypatch.setattr(state.stores.provisioning, "check", unavailable)
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


async def test_interrupted_change_is_finished_once_the_guest_is_reachable(
    state: Driver,
) -> None:
    absent = errors.PeerUnavailable("the handler is absent")
    assert await finish(state, [absent, None, None]) == [VOLUME, OTHER, VOLUME]
