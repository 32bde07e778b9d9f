"""Operations outlive their callers, one at a time per key; a deadline ends the wait of a caller, never the work."""

import asyncio
import logging
import math

import pytest

from crust.core import errors, operations
from crust.host.process.workers import Workers
from tests.support.raised import raised


class Work:
    """Work that ends when the test allows it, and may fail."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.end = asyncio.Event()
        self.runs = 0
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.runs += 1
        self.began.set()
        await self.end.wait()
        if self.error is not None:
            raise self.error
        return self.runs


async def test_identical_request_joins_and_gets_the_same_result() -> None:
    running, work = operations.KeyedOperations(Workers("the test")), Work()
    first = asyncio.create_task(running.run("v", "publish", {"a": 1}, work))
    await work.began.wait()
    second = asyncio.create_task(running.run("v", "publish", {"a": 1}, work))
    await asyncio.sleep(0)
    work.end.set()
    assert list(await asyncio.gather(first, second)) == [1, 1]
    assert work.runs == 1


@pytest.mark.parametrize(("name", "identity"), [("publish", 2), ("unpublish", 1)])
async def test_different_request_is_refused_naming_the_first(name: str, identity: int) -> None:
    running, work = operations.KeyedOperations(Workers("the test")), Work()
    first = asyncio.create_task(running.run("v", "publish", 1, work))
    await work.began.wait()
    with pytest.raises(
        operations.OperationInProgress, match=r"v is busy: publish has been running .* retry"
    ):
        await running.run("v", name, identity, work)
    assert await running.run("other", name, identity, _done) == "done"
    work.end.set()
    await first


async def test_failure_reaches_all_waiters_and_frees_the_key() -> None:
    running, work = operations.KeyedOperations(Workers("the test")), Work()
    work.error = ValueError("no")
    first = asyncio.create_task(running.run("v", "publish", 1, work))
    await work.began.wait()
    second = asyncio.create_task(running.run("v", "publish", 1, work))
    await asyncio.sleep(0)
    work.end.set()
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(result) for result in results] == [ValueError, ValueError]
    assert await running.run("v", "unpublish", 1, _done) == "done"


async def _until_unwanted() -> None:
    """Work without an end of its own."""
    while True:
        operations.check_wanted()
        await asyncio.sleep(0)


@pytest.mark.parametrize("end", ["a stop", "its unpublish"])
async def test_work_without_end_ends_once_it_is_unwanted(end: str) -> None:
    running = operations.KeyedOperations(Workers("the test"))
    work = asyncio.create_task(
        running.run("v", "publish", ("t", 1), _until_unwanted, ended_by="t", also=("w",))
    )
    await asyncio.sleep(0)
    for name, identity in (("publish", ("u", 1)), ("unpublish", "u")):
        with pytest.raises(operations.OperationInProgress):
            await running.run("v", name, identity, _done)
    await asyncio.sleep(0)
    assert not work.done()
    if end == "a stop":
        await running.drain()
    else:
        with pytest.raises(operations.OperationInProgress):
            await running.run("v", "unpublish", "t", _done)
    with raised("OperationGivenUp", errors.OperationPending, match=r"publish of v .*retry"):
        await work
    assert running.running() == 0


async def test_work_without_end_ends_when_nobody_waits_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = operations.KeyedOperations(Workers("the test"))
    caller = asyncio.create_task(running.run("v", "publish", 1, _until_unwanted))
    await asyncio.sleep(0)
    monkeypatch.setattr(operations, "ABANDONED_S", 0)
    await asyncio.sleep(0)
    assert running.running() == 1
    caller.cancel()
    await running.idle()


async def test_check_outside_of_operations_passes() -> None:
    operations.check_wanted()


@pytest.mark.parametrize(
    ("error", "message", "name"),
    [
        (None, "operation finished after its callers stopped waiting", None),
        (
            ValueError("login with hunter2 refused"),
            "operation failed after its callers stopped waiting",
            "ValueError",
        ),
    ],
)
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["overdue", "cancelled"])
async def test_outcome_of_an_operation_without_waiters_is_logged(
    error: Exception | None,
    message: str,
    name: str | None,
    caplog: pytest.LogCaptureFixture,
    *,
    is_cancelled: bool,
) -> None:
    caplog.set_level(logging.INFO)
    running, work = operations.KeyedOperations(Workers("the test")), Work()
    work.error = error
    limit_s = math.inf if is_cancelled else 0.001
    caller = asyncio.create_task(running.run("v", "publish", 1, work, limit_s=limit_s))
    await work.began.wait()
    if is_cancelled:
        caller.cancel()
    await asyncio.wait([caller])
    work.end.set()
    await running.drain()
    (record,) = caplog.records
    assert (record.getMessage(), vars(record).get("error_name")) == (message, name)
    assert "hunter2" not in str(vars(record)), "a driver's text may have a secret of the request"


async def test_drain_refuses_new_operations_and_waits_for_running_ones() -> None:
    running, work = operations.KeyedOperations(Workers("the test")), Work()
    first = asyncio.create_task(running.run("v", "publish", 1, work))
    await work.began.wait()
    draining = asyncio.create_task(running.drain())
    await asyncio.sleep(0)
    for identity in (1, 2):
        with pytest.raises(operations.ShuttingDown, match="stopping"):
            await running.run("w", "publish", identity, work)
    assert not draining.done()
    work.end.set()
    await draining
    assert await first == 1


async def test_shared_blocks_and_operations_of_a_key_exclude_each_other() -> None:
    running, work = operations.KeyedOperations(Workers("the test")), Work()
    with running.shared("v"), running.shared("v"):
        with pytest.raises(operations.OperationInProgress, match="v is busy"):
            await running.run("v", "publish", 1, work)
        assert await running.run("w", "publish", 1, _done) == "done"
    first = asyncio.create_task(running.run("v", "publish", 1, work))
    await work.began.wait()
    with pytest.raises(operations.OperationInProgress, match="publish"), running.shared("v"):
        raise AssertionError("shared while an operation runs")
    work.end.set()
    await first
    with running.shared("v"):
        pass


async def _done() -> str:
    return "done"


async def test_operation_takes_all_its_keys_or_none_until_it_ends() -> None:
    running, work, free = operations.KeyedOperations(Workers("the test")), Work(), Work()
    free.end.set()
    task = asyncio.create_task(running.run("c", "copy", None, work, also=["a", "b", "a", "c"]))
    await work.began.wait()
    assert running.running() == 1
    for key in ("a", "b"):
        with pytest.raises(operations.OperationInProgress, match=f"{key} is busy: copy"):
            await running.run(key, "copy", None, free)
        with pytest.raises(operations.OperationInProgress), running.shared(key):
            pass
    with pytest.raises(operations.OperationInProgress, match="b is busy"):
        await running.run("e", "other", None, free, also=["d", "b"])
    with running.shared("f"), pytest.raises(operations.OperationInProgress, match="f is busy"):
        await running.run("e", "other", None, free, also=["d", "f"])
    assert await running.run("d", "other", None, free) == 1
    joined = asyncio.create_task(running.run("c", "copy", None, work, also=["a", "b"]))
    await asyncio.sleep(0)
    work.end.set()
    assert await task == await joined == 1
    assert await running.run("a", "copy", None, free) == 2


async def test_caller_is_answered_before_deadline_while_operation_goes_on() -> None:
    running, work = operations.KeyedOperations(Workers("the test")), Work()
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
    running, work = operations.KeyedOperations(Workers("the test")), Work()
    for _ in range(3):
        with pytest.raises(operations.OperationOverdue):
            await running.run("v", "publish", 1, work, limit_s=0.01)
    assert [(operation.key, operation.name) for operation in running.overdue()] == [
        ("v", "publish")
    ]
    assert work.runs == 1
    work.end.set()
    await running.idle()
    assert running.overdue() == ()


async def test_operation_within_its_limit_is_not_overdue() -> None:
    running, work, other = operations.KeyedOperations(Workers("the test")), Work(), Work()
    first = asyncio.create_task(running.run("v", "publish", 1, work, limit_s=3600, left_s=3600))
    second = asyncio.create_task(running.run("w", "publish", 1, other))
    await other.began.wait()
    assert running.overdue() == ()
    work.end.set()
    other.end.set()
    assert await first == await second == 1
