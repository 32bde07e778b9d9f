"""Work in the background begins again after what it did not expect, and says so."""

import pytest

from crust import metrics
from crust.cluster import forever


async def test_work_that_fails_is_logged_and_begins_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forever, "_PAUSE_S", 0)
    attempts = []
    counted = metrics.cluster_work_failures.labels("the test")
    before = counted._value.get()

    async def work() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise ValueError("unexpected")

    await forever.forever(work, "the test")
    assert len(attempts) == 3
    assert counted._value.get() - before == 2
    assert [each.exc_info is not None for each in caplog.records] == [True, True]
