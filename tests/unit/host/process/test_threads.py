"""The threads behind asyncio.to_thread."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from crust.host.process.threads import Threads

LIMIT = 2


class Held:
    """A call that begins, and ends when the test allows it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.began = asyncio.Event()
        self.end = threading.Event()
        self.runs = 0
        self.ended = False

    def __call__(self) -> str:
        self.runs += 1
        self._loop.call_soon_threadsafe(self.began.set)
        self.end.wait()
        self.ended = True
        return threading.current_thread().name


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads(LIMIT)
    yield made
    made.shutdown()


@pytest.fixture
async def used(threads: Threads) -> Threads:
    asyncio.get_running_loop().set_default_executor(threads)
    return threads


async def _begun(call: Held) -> "asyncio.Task[str]":
    task = asyncio.create_task(asyncio.to_thread(call))
    await call.began.wait()
    return task


def _fail() -> None:
    raise ValueError("of the call")


@pytest.mark.usefixtures("used")
async def test_a_call_returns_and_raises_what_the_function_does() -> None:
    assert await asyncio.to_thread(max, 1, 2) == 2
    with pytest.raises(ValueError, match="of the call"):
        await asyncio.to_thread(_fail)
    assert await asyncio.to_thread(max, 3, 4) == 4


@pytest.mark.usefixtures("used")
async def test_calls_one_after_the_other_are_made_by_one_thread() -> None:
    seen = {await asyncio.to_thread(threading.get_ident) for _ in range(100)}
    assert len(seen) == 1


@pytest.mark.usefixtures("used")
async def test_a_call_beyond_the_limit_waits_for_a_thread() -> None:
    running = [Held() for _ in range(LIMIT)]
    tasks = [await _begun(each) for each in running]
    last = Held()
    waiting = asyncio.create_task(asyncio.to_thread(last))
    await asyncio.sleep(0)
    assert last.runs == 0
    last.end.set()
    running[1].end.set()
    assert await waiting == await tasks[1]
    running[0].end.set()
    await tasks[0]


async def test_a_cancelled_caller_ends_no_call_that_has_begun_and_one_that_waits_never_begins(
    used: Threads,
) -> None:
    running = [Held() for _ in range(LIMIT)]
    tasks = [await _begun(each) for each in running]
    never = Held()
    waiting = asyncio.create_task(asyncio.to_thread(never))
    await asyncio.sleep(0)
    for task in (tasks[0], waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    for each in running:
        each.end.set()
    await tasks[1]
    assert await asyncio.to_thread(max, 1, 2) == 2
    used.shutdown()  # nobody else waits for the call whose caller was cancelled
    assert [each.ended for each in running] == [True, True]
    assert never.runs == 0


async def test_calls_end_before_the_threads_do(used: Threads) -> None:
    held = Held()
    task = await _begun(held)
    idle = await asyncio.to_thread(threading.current_thread)
    ending = threading.Thread(target=used.shutdown)
    ending.start()
    idle.join()
    with pytest.raises(RuntimeError, match="ends"):
        await asyncio.to_thread(max, 1, 2)
    held.end.set()
    assert await task
    ending.join()
    assert held.ended


def test_a_call_whose_loop_is_gone_ends_quietly(
    threads: Threads, capfd: pytest.CaptureFixture[str]
) -> None:
    async def begin() -> Held:
        held = Held()
        asyncio.get_running_loop().run_in_executor(threads, held)
        await held.began.wait()
        return held

    held = asyncio.run(begin())
    held.end.set()
    threads.shutdown()
    assert held.ended
    assert capfd.readouterr().err == ""
