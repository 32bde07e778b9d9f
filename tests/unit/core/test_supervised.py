"""Background work: no loop of a process ends unseen."""

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import crust
from crust.core import errors, metrics, supervised
from crust.rpc.serving.health import Health

TASKS_THAT_ARE_AWAITED = {
    "blockdriver/pool_watch.py",  # one look, shielded
    "cli/inspecting/watching.py",  # a command, which waits for the first of two
    "cli/programs/daemons.py",
    "csi_shim/deferral.py",  # the undo of a call, shielded
    "host/process/commands.py",
    "kata/statistics.py",  # one request, shielded
    "core/operations.py",
    "proxy/events.py",
    "rpc/driver_facts.py",  # one question
    "rpc/port.py",  # a connection's state
    "conformance/runtimes/subject.py",  # a command, which waits for the first of two
    "core/supervised.py",
    "kata/gate.py",  # the work of one call, which goes on where its time is over
    "kata/nri.py",  # the calls of the engine, until the connection ends
}
"""Files with tasks that are no loop: their makers wait for them, and get their errors."""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "_FIRST_PAUSE_S", 0.0)


class Work:
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
async def test_work_that_fails_begins_again_and_is_logged_counted_and_shown(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    work, health, before = Work(3, error), Health(), failures_counted()
    async with supervised.supervised("the test", work.run, health, of="x"), asyncio.timeout(60):
        await work.goes_on.wait()
        (problem,) = health.problems.values()
        assert "background work (the test of x) of this process fails: 3 times" in str(problem)
        health.check()  # it fails no probe
    assert failures_counted() == before + 3
    assert [each.message for each in caplog.records].count("background work failed") == 3
    assert health.problems == {}


async def test_work_that_runs_steadily_is_healthy_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "STEADY_S", 0.01)
    work, health = Work(1, OSError("no descriptor")), Health()
    async with supervised.supervised("the test", work.run, health), asyncio.timeout(60):
        await work.goes_on.wait()
        assert health.problems
        while health.problems:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_process_ends_when_work_that_it_cannot_do_without_keeps_failing() -> None:
    work, ended = Work(supervised.ATTEMPTS, ValueError("a bug")), asyncio.Event()
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


async def test_end_of_the_block_cancels_the_work_and_waits_for_it() -> None:
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


def _started_tasks(path: Path) -> Iterator[int]:
    """Lines that start a task; a TaskGroup's are awaited by its block."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            is_loop = isinstance(owner, ast.Call) or (
                isinstance(owner, ast.Name) and owner.id in ("asyncio", "loop")
            )
            if node.func.attr in ("create_task", "ensure_future") and is_loop:
                yield node.lineno


def test_no_other_file_of_crust_starts_a_background_task() -> None:
    root = Path(crust.__file__).parent
    starting = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if any(_started_tasks(path))
    }
    assert starting <= TASKS_THAT_ARE_AWAITED
