"""Work in the background: it begins again after a failure, is shown and counted, and ends with its block."""

import asyncio

import pytest

from crust.core import errors, metrics, supervised
from crust.core.supervised import Health


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "_FIRST_PAUSE_S", 0.0)


class SupervisedWork:
    """Fails so many times, then goes on until it is cancelled."""

    def __init__(self, failures: int, error: BaseException) -> None:
        self.failures = failures
        self.error = error
        self.runs = 0
        self.goes_on = asyncio.Event()

    async def run(self) -> None:
        self.runs += 1
        if self.runs <= self.failures:
            raise self.error
        self.goes_on.set()
        await asyncio.Event().wait()


def failures_counted() -> float:
    return float(metrics.background_failures.labels("the test")._value.get())


@pytest.mark.parametrize(
    "error",
    [
        errors.NotReady("the peer is away"),
        RuntimeError("can't start new thread"),
        MemoryError(),
        KeyError("x"),
        asyncio.CancelledError(),
    ],
    ids=repr,
)
async def test_failing_work_begins_again_and_is_logged_counted_shown(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    work, health, before = SupervisedWork(3, error), Health(), failures_counted()
    async with supervised.supervised("the test", work.run, health, of="x"), asyncio.timeout(60):
        await work.goes_on.wait()
        (problem,) = health.problems.values()
        assert "background work (the test of x) of this process fails: 3 times" in str(problem)
        health.check_healthy()  # it fails no probe
    assert failures_counted() == before + 3
    assert [record.message for record in caplog.records].count("background work failed") == 3
    assert health.problems == {}


async def test_work_that_runs_steadily_is_healthy_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "STEADY_S", 0.01)
    work, health = SupervisedWork(1, OSError("no descriptor")), Health()
    async with supervised.supervised("the test", work.run, health), asyncio.timeout(60):
        await work.goes_on.wait()
        assert health.problems
        while health.problems:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_process_ends_when_indispensable_work_keeps_failing() -> None:
    work, ended = SupervisedWork(supervised.ATTEMPTS, ValueError("a bug")), asyncio.Event()
    problems: list[errors.CrustError] = []

    def end(problem: errors.CrustError) -> None:
        problems.append(problem)
        ended.set()

    async with supervised.supervised("the test", work.run, Health(), end=end), asyncio.timeout(60):
        await ended.wait()
    assert "at last with ValueError: a bug" in str(problems[0])
    assert work.runs == supervised.ATTEMPTS


async def test_work_that_returns_is_not_begun_again() -> None:
    runs = 0

    async def once() -> None:
        nonlocal runs
        runs += 1

    async with supervised.supervised("the test", once, Health()):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert runs == 1


async def test_end_of_block_cancels_work_and_waits_for_it() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended = True

    async with supervised.supervised("the test", work, Health()):
        await asyncio.sleep(0)
    assert ended


async def test_work_that_fails_for_hours_begins_again() -> None:
    work = SupervisedWork(1_100, errors.NotReady("the peer is away"))
    async with supervised.supervised("the test", work.run, Health()), asyncio.timeout(60):
        await work.goes_on.wait()
