"""The health of a pool."""

import pytest

from crust.blockdriver.driver import Driver
from crust.blockdriver.engines import protocol
from crust.core import errors


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
