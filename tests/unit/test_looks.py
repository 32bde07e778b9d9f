"""Looks, which may never return: one thread for each key, and an answer in time for every caller."""

import asyncio
import threading

import pytest

from crust.core import errors
from crust.core.operations import KeyedOperations, SystemCallTimedOut
from crust.host.process import workers
from crust.host.process.workers import Workers


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy is no pool that hangs."""
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)


def looks() -> KeyedOperations:
    return KeyedOperations(Workers("the test"))


async def test_hanging_call_times_out_and_is_joined_by_next() -> None:
    calls = looks()
    release = threading.Event()
    started = 0

    def hang() -> int:
        nonlocal started
        started += 1
        release.wait()
        return 7

    for _ in range(3):
        with pytest.raises(SystemCallTimedOut, match="does not answer"):
            await calls.look("/hung", hang, timeout_s=0.01)
    assert await calls.look("/fine", lambda: 1, timeout_s=10) == 1
    waiting = asyncio.create_task(calls.look("/hung", hang, timeout_s=10))
    await asyncio.sleep(0)
    release.set()
    assert await waiting == 7
    assert started == 1


async def test_call_error_reaches_all_callers_and_next_runs_again() -> None:
    calls = looks()

    def fail() -> int:
        raise errors.NotFound("no such volume")

    for _ in range(2):
        with pytest.raises(errors.NotFound, match="no such volume"):
            await calls.look("key", fail, timeout_s=10)
    assert await calls.look("key", lambda: 3, timeout_s=10) == 3


async def test_call_error_after_callers_left_is_not_logged() -> None:
    calls = looks()
    release = threading.Event()

    def fail_late() -> int:
        release.wait()
        raise errors.NotFound("late")

    with pytest.raises(SystemCallTimedOut):
        await calls.look("key", fail_late, timeout_s=0.01)
    late = asyncio.create_task(calls.look("key", fail_late, timeout_s=10))
    await asyncio.sleep(0)
    late.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await late


async def test_fresh_call_joins_none_that_began_before_it_came() -> None:
    """Else a list that began before a volume was made would be the answer to who asks after it was made."""
    calls, release, made = looks(), threading.Event(), [0]
    began = threading.Event()

    def look() -> int:
        seen = made[0]
        began.set()
        release.wait()
        return seen

    first = asyncio.create_task(calls.look("list", look, timeout_s=3600, fresh=True))
    await asyncio.to_thread(began.wait)
    made[0] = 1
    later = [
        asyncio.create_task(calls.look("list", look, timeout_s=3600, fresh=True)) for _ in range(5)
    ]
    await asyncio.sleep(0)
    release.set()
    assert await first == 0
    assert await asyncio.gather(*later) == [1] * 5


async def test_fresh_call_behind_one_that_hangs_takes_no_thread() -> None:
    calls, release, started = looks(), threading.Event(), [0]

    def hang() -> None:
        started[0] += 1
        release.wait()

    for _ in range(5):
        with pytest.raises(SystemCallTimedOut, match="a list does not answer"):
            await calls.look(("list", 1), hang, timeout_s=0.01, shown="a list", fresh=True)
    assert started == [1]
    release.set()
