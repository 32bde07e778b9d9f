"""A machine that is busy."""

import pytest

from crust.blockdriver.services import identity
from crust.host.process import workers


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy is no pool that hangs."""
    monkeypatch.setattr(identity, "_PROBE_TIMEOUT_S", 30)
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
