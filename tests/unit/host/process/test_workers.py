"""A pool of threads: bounded, never shared, asked before new work begins; looks that may never return."""

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from crust.core import errors
from crust.core.operations import KeyedOperations, SystemCallTimedOut
from crust.host.process import workers
from crust.host.process.workers import LongWork, NoWorkerFree, Workers


@pytest.fixture
def dead() -> Iterator[threading.Event]:
    """What calls hang on, until the test ends at the latest."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy is no pool that hangs."""
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)


class Hanging:
    """A call that hangs; `running` is set when it has a thread."""

    def __init__(self, dead: threading.Event) -> None:
        self._dead = dead
        self.running = threading.Event()
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        self.running.set()
        self._dead.wait()
        return "it ended"


async def test_run_passes_arguments_results_errors_and_context() -> None:
    pool, variable = Workers("pool"), contextvars.ContextVar("variable", default="")
    variable.set("of the caller")

    def work(text: str, *, count: int) -> str:
        return text * count + variable.get()

    def refuse() -> None:
        raise errors.NotFound("gone")

    assert await pool.run(work, "a", count=2) == "aaof the caller"
    with pytest.raises(errors.NotFound, match="gone"):
        await pool.run(refuse)


async def test_pool_whose_threads_hang_leaves_another_pool_alone(dead: threading.Event) -> None:
    """And the process' own, which is used outside of any."""
    hung_disk, well = Workers("hung_disk", limit=2), Workers("well", limit=2)
    hung = [asyncio.create_task(hung_disk.run(dead.wait)) for _ in range(20)]
    await asyncio.sleep(0)
    assert await workers.run(lambda: 7) == 7
    await well.check_free()
    with well.used():
        assert await workers.run(lambda: "alive") == "alive"
    dead.set()
    await asyncio.gather(*hung)


async def test_cancelled_caller_without_a_thread_is_never_called(dead: threading.Event) -> None:
    pool, first, second = Workers("pool", limit=1), Hanging(dead), Hanging(dead)
    hung = asyncio.create_task(pool.run(first))
    await workers.run(first.running.wait)
    caller = asyncio.create_task(pool.run(second))
    await asyncio.sleep(0)
    caller.cancel()
    dead.set()
    await hung
    await pool.probe()
    assert second.calls == 0


async def test_cancelled_callers_leave_the_queue_of_a_hanging_pool(dead: threading.Event) -> None:
    """Retries of a CO, and the watch's own question every 5 s, filled the memory while a disk hung."""
    pool, hanging, waits = Workers("pool", limit=1), Hanging(dead), Hanging(dead)
    hung = asyncio.create_task(pool.run(hanging))
    await workers.run(hanging.running.wait)
    kept = asyncio.create_task(pool.run(waits))
    retries = [asyncio.create_task(pool.run(hanging)) for _ in range(1000)]
    await asyncio.sleep(0)
    assert pool.load["waiting"] == 1001
    for retry in retries:
        retry.cancel()
    await asyncio.gather(*retries, return_exceptions=True)
    assert pool.load["waiting"] == 1
    dead.set()
    await asyncio.gather(hung, kept)
    assert (hanging.calls, waits.calls) == (1, 1)


async def test_thread_that_cannot_start_is_no_worker_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a unit or pod; nothing of the call may run later."""
    pool, calls = Workers("pool"), 0

    def count() -> None:
        nonlocal calls
        calls += 1

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(NoWorkerFree, match="no thread can be started"):
            await pool.run(count)
    await pool.probe()
    assert calls == 0


async def test_thread_without_call_ends_and_next_call_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.01)
    pool = Workers("pool")
    thread = await pool.run(threading.current_thread)
    await workers.run(thread.join)
    assert pool.load["busy"] == 0
    assert await pool.run(threading.current_thread) is not thread


def test_pool_serves_one_loop_after_another_and_a_forked_process() -> None:
    """Which has none of its threads."""
    pool = Workers("pool", limit=1)
    for _ in range(2):
        assert asyncio.run(pool.run(lambda: 7)) == 7
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = asyncio.run(pool.run(lambda: 9))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


async def test_long_work_leaves_threads_for_rest_and_other_kind(
    dead: threading.Event,
) -> None:
    """Copies that take hours are no pool that hangs, and do not end fsGroup."""
    pool = Workers("pool", limit=4)
    began: list[LongWork] = []

    async def work(kind: LongWork) -> None:
        async with workers.long_work(kind):
            began.append(kind)
            await workers.run(dead.wait)

    with pool.used():
        tasks = [asyncio.create_task(work(kind)) for kind in LongWork for _ in range(20)]
    await asyncio.sleep(0)
    await pool.probe()
    assert began == list(LongWork)
    dead.set()
    await asyncio.gather(*tasks)


async def test_turn_is_given_to_one_step_at_a_time() -> None:
    pool, running, most = Workers("pool", limit=4), 0, 0

    def step() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        os.sched_yield()
        running -= 1

    async def work() -> None:
        for _ in range(20):
            async with workers.turn():
                await workers.run(step)

    with pool.used():
        await asyncio.gather(*(work() for _ in range(4)))
    assert most == 1


async def test_turn_of_a_hanging_step_is_not_awaited_for_ever(
    dead: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "TURN_S", 0.01)
    pool, done = Workers("pool", limit=4), []

    async def work(step: Callable[[], object]) -> None:
        async with workers.turn():
            done.append(await workers.run(step))

    with pool.used():
        hung = asyncio.create_task(work(dead.wait))
        await asyncio.sleep(0)
        await asyncio.gather(work(lambda: "first"), work(lambda: "second"))
        assert sorted(map(str, done)) == ["first", "second"]
        dead.set()
        await hung
        async with asyncio.timeout(5), workers.turn():  # it was given back once
            assert pool.turns.locked()


async def test_pool_keeps_its_limit_of_threads_and_counts_waiting_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
    pool, hold = Workers("a pool", limit=2), threading.Event()
    calls = [asyncio.ensure_future(pool.run(_held, hold)) for _ in range(30)]
    await asyncio.sleep(0)
    assert pool.load == {"limit": 2, "busy": 2, "waiting": 28, "refused": 0}
    for ask in (pool.check_free, pool.probe):
        with pytest.raises(NoWorkerFree, match=r"a pool .* none of its 2 threads"):
            await ask()
    assert pool.load["refused"] == 2
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    waiting = asyncio.create_task(pool.check_free())
    await asyncio.sleep(0)
    hold.set()
    await waiting
    assert len(set(await asyncio.gather(*calls))) == 2
    await pool.probe()
    assert (pool.load["busy"], pool.load["waiting"]) == (0, 0)


def _held(hold: threading.Event) -> int:
    hold.wait()
    return threading.get_ident()


async def test_calls_one_after_the_other_are_made_by_one_thread() -> None:
    pool = Workers("pool")
    assert len({await pool.run(threading.get_ident) for _ in range(100)}) == 1


async def test_caller_that_is_cancelled_ends_no_call_that_has_begun(
    dead: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is taken until the call ends."""
    pool, ended, began = Workers("pool", limit=1), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        dead.wait()
        ended.set()

    caller = asyncio.create_task(pool.run(work))
    await workers.run(began.wait)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
    with pytest.raises(NoWorkerFree):
        await pool.check_free()
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    dead.set()
    await workers.run(ended.wait)
    await pool.probe()


def test_call_whose_loop_is_gone_ends_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    began, end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        end.wait()
        ended.set()

    async def begin() -> None:
        call = asyncio.create_task(Workers("pool").run(work))
        await workers.run(began.wait)
        call.cancel()

    asyncio.run(begin())
    end.set()
    assert ended.wait(60)
    assert capfd.readouterr().err == ""


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
