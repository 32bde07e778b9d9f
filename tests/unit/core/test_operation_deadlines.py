"""A deadline ends the wait of a caller, never the work; the work keeps its key."""

import asyncio

import pytest

from crust.core import operations
from tests.unit.core.test_operations import Work


async def test_caller_is_answered_before_its_own_deadline_and_the_operation_goes_on() -> None:
    running, work = operations.KeyedOperations(), Work()
    with pytest.raises(
        operations.OperationOverdue, match=r"publish of v has not ended: .* goes on"
    ):
        await running.run("v", "publish", 1, work, left_s=0.01)
    with pytest.raises(operations.OperationInProgress):
        await running.run("v", "unpublish", 1, work)
    joined = asyncio.create_task(running.run("v", "publish", 1, work))
    await asyncio.sleep(0)
    work.end.set()
    assert await joined == 1


async def test_retry_of_an_overdue_operation_is_answered_at_once() -> None:
    running, work = operations.KeyedOperations(), Work()
    for _ in range(3):
        with pytest.raises(operations.OperationOverdue):
            await running.run("v", "publish", 1, work, limit_s=0.01)
    assert [(each.key, each.name) for each in running.overdue()] == [("v", "publish")]
    assert work.runs == 1
    work.end.set()
    await running.idle()
    assert running.overdue() == ()


async def test_operation_within_its_limit_is_not_overdue() -> None:
    running, work, other = operations.KeyedOperations(), Work(), Work()
    first = asyncio.create_task(running.run("v", "publish", 1, work, limit_s=3600, left_s=3600))
    second = asyncio.create_task(running.run("w", "publish", 1, other))
    await other.began.wait()
    assert running.overdue() == ()
    work.end.set()
    other.end.set()
    assert await first == await second == 1


async def test_failure_after_the_last_caller_was_told_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running, work = operations.KeyedOperations(), Work()
    work.error = ValueError("login with hunter2 refused")
    with pytest.raises(operations.OperationOverdue):
        await running.run("v", "publish", 1, work, limit_s=0)
    work.end.set()
    await running.idle()
    (record,) = caplog.records
    assert record.getMessage() == "operation failed after its callers stopped waiting"
    assert vars(record)["error_name"] == "ValueError"
    assert "hunter2" not in str(vars(record)), "a driver's text may have a secret of the request"
