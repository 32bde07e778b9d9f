"""The handler's service."""

import pytest

from crust.core import volumes
from crust.runtime_handler import service
from tests.support.records.records import TARGET


async def test_handler_that_overrides_nothing_offers_nothing() -> None:
    base = service.Handler()
    for call in (
        base.stats(TARGET),
        base.expand(TARGET, volumes.CapacityRange(1, 0)),
        base.health(TARGET),
        base.freeze(TARGET, 1),
        base.thaw(TARGET),
        base.set_limits(TARGET, volumes.IoLimits()),
    ):
        with pytest.raises(service.FeatureNotOffered):
            await call
