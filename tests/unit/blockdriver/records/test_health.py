"""The health of a pool, and the numbers of its volumes that are not healthy."""

import dataclasses
from pathlib import Path

import pytest

from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines import protocol
from crust.blockdriver.records.health import Kind
from crust.core import errors, metrics
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import MIB
from tests.support.drivers.memory_backend import MemoryBackend


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
    assert [finding.kind for finding in health_check.pool()] == [Kind.INACCESSIBLE]


async def test_thin_volumes_are_unhealthy_while_promised_bytes_are_missing(
    state: Driver, provisioner: Provisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thick volume has all of its blocks."""
    ids = {}
    for kind in ("thin", "thick"):
        request = driver_state.create(kind, required=64 * MIB)
        request = dataclasses.replace(request, parameters=(("crust.dev/provisioning", kind),))
        ids[kind] = (await provisioner.create(request)).volume_id

    def reasons(free_bytes: int) -> dict[str, list[str]]:
        space = protocol.PoolSpace(free_bytes, own_bytes=64 * MIB, spare_bytes=2 * MIB)
        monkeypatch.setattr(state.stores.provisioning, "space", lambda: space)
        state.stores.capacity.available_bytes()
        check = state.controller.health_check
        return {kind: [of.reason for of in check.examine(ids[kind]).findings] for kind in ids}

    assert reasons(64 * MIB) == {"thin": [], "thick": []}
    assert reasons(64 * MIB - 1) == {"thin": ["CapacityMissing"], "thick": []}
    assert reasons(64 * MIB) == {"thin": [], "thick": []}


async def test_overcommitted_volumes_are_unhealthy_before_the_medium_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have nothing of it: the volumes were promised more than there is."""
    state = driver_state.opened(tmp_path, overcommit=2.0)
    request = driver_state.create("a", required=8 * MIB)
    made = await state.controller.provisioner.create(request)
    for free_bytes, is_healthy in ((2 * MIB, True), (2 * MIB - 1, False)):
        space = protocol.PoolSpace(free_bytes, own_bytes=8 * MIB, spare_bytes=2 * MIB)
        monkeypatch.setattr(state.stores.provisioning, "space", lambda space=space: space)
        state.stores.capacity.available_bytes()
        assert (not state.controller.health_check.examine(made.volume_id).findings) == is_healthy


async def test_unhealthy_volumes_are_counted_by_reason_until_they_are_well(
    state: Driver, provisioner: Provisioner
) -> None:
    lost = (await provisioner.create(driver_state.create("lost", required=MIB))).volume_id
    await provisioner.create(driver_state.create("well", required=MIB))
    backend = state.stores.provisioning
    assert isinstance(backend, MemoryBackend)
    image = backend.images.pop(lost)
    assert _shown(state) == {"ImageMissing": 1}
    backend.images[lost] = image
    assert _shown(state) == {"none": 0}


def _shown(driver: Driver) -> dict[str, float]:
    metrics.show_abnormal("examined", driver.count_abnormal())
    (family,) = metrics.volumes_abnormal.collect()
    return {
        sample.labels["reason"]: sample.value
        for sample in family.samples
        if sample.labels["driver"] == "examined"
    }
