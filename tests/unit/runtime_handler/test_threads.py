"""The SDK's coroutines on files that hang: the loop goes on, the process ends, no claim lacks an owner."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from crust.host.process import workers
from crust.runtime_handler import resolve_source, threads


class Hang:
    """A call that hangs until the test has ended. `begun` says that a thread makes it."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.end = threading.Event()

    def __call__(self, _: object = None) -> str:
        self.begun.release()
        self.end.wait()
        return "made"


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.end.set()


async def test_hung_path_stops_neither_loop_nor_other_calls(
    hang: Hang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: hang() if path == "/hung" else real(path))
    hung = asyncio.create_task(resolve_source(str(tmp_path), "/hung"))
    await workers.run(hang.begun.acquire)
    other = await resolve_source(str(tmp_path), str(tmp_path))
    assert not hung.done()
    assert getattr(other, "source", "") == str(tmp_path)
    hung.cancel()


async def test_call_does_not_wait_when_all_threads_hang(
    hang: Hang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(threads, "POOL", workers.Workers("the SDK", limit=2))
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
    hung = [asyncio.create_task(threads.run(hang)) for _ in range(2)]
    for _ in hung:
        await workers.run(hang.begun.acquire)
    for call in (threads.run(os.getpid), resolve_source(str(tmp_path), "/")):
        with pytest.raises(workers.NoWorkerFree, match="the SDK"):
            await call
    hang.end.set()
    assert await asyncio.gather(*hung) == ["made", "made"]


async def test_cancelled_caller_has_nothing_that_a_thread_made(hang: Hang) -> None:
    undone, is_undone = list[str](), threading.Event()

    def undo(made: str) -> None:
        undone.append(made)
        is_undone.set()

    task = asyncio.create_task(threads.run_or_undo(hang, undo))
    await workers.run(hang.begun.acquire)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    hang.end.set()
    await workers.run(is_undone.wait)
    assert undone == ["made"]


async def test_caller_cancelled_after_the_thread_has_made_it_has_nothing() -> None:
    """The result is on its way to the loop."""
    made, is_undone = threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def make() -> str:
        loop.call_soon_threadsafe(task.cancel)  # before the result
        made.set()
        return "made"

    task = asyncio.create_task(threads.run_or_undo(make, lambda _: is_undone.set()))
    with pytest.raises(asyncio.CancelledError):
        await task
    await workers.run(made.wait)
    await workers.run(is_undone.wait)


PROGRAM = """
import asyncio, os, sys, threading
from crust.runtime_handler import resolve_source, threads

began = threading.Event()
os.path.realpath = lambda path: (began.set(), threading.Event().wait())

async def main():
    hung = asyncio.create_task(resolve_source(sys.argv[1], "/hung"))
    await threads.run(began.wait)
    print("the loop goes on", flush=True)

asyncio.run(main())
print("the loop has ended", flush=True)
"""


def test_process_ends_while_a_file_hangs(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "the loop goes on\nthe loop has ended\n"


async def test_loops_own_threads_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Refusing(ThreadPoolExecutor):
        def submit(self, *_: object, **__: object) -> None:  # type: ignore[override]
            raise AssertionError("the SDK has used the event loop's own threads")

    asyncio.get_running_loop().set_default_executor(Refusing())
    await resolve_source(str(tmp_path), "/")
    await threads.run(os.getpid)
