"""The watch of a part's threads, held while a test makes them hang: a check that began meanwhile would wait long."""

import asyncio

import pytest

from crust.rpc.serving.worker_watch import WorkerWatch


def watch_locked(monkeypatch: pytest.MonkeyPatch) -> asyncio.Lock:
    """The watch looks only while it has this lock."""
    look, lock = WorkerWatch.check_threads, asyncio.Lock()

    async def with_lock(watch: WorkerWatch) -> None:
        async with lock:
            await look(watch)

    monkeypatch.setattr(WorkerWatch, "check_threads", with_lock)
    return lock
