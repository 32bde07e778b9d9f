"""The watch over the threads of a process: what hangs is shown, and fails a probe where it must."""

import asyncio
import threading

import pytest

from crust.core import operations
from crust.core.supervised import Health
from crust.host.process import workers
from crust.host.process.workers import Workers
from crust.rpc.serving.worker_watch import WorkerWatch

# The health of a part whose threads hang: it names the part and what hangs, and recovers.


async def test_watchdog_is_told_while_a_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, health, dead, pings = Workers("the proxy", limit=1), Health(), threading.Event(), []
    watch = WorkerWatch(
        pool, operations.KeyedOperations(pool), health, ping=lambda: pings.append("alive")
    )
    await watch.check_threads()
    assert pings == ["alive"]
    hung = asyncio.create_task(pool.run(dead.wait))
    await asyncio.sleep(0)
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
    await watch.check_threads()
    assert pings == ["alive"]
    assert [problem.error_name for problem in health.problems.values()] == ["NoWorkerFree"]
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    dead.set()
    await hung
    await watch.check_threads()
    assert pings == ["alive"] * 2
    assert health.problems == {}


async def test_operation_without_end_is_shown_and_fails_no_probe() -> None:
    pool, health, dead = Workers("the proxy", limit=2), Health(), threading.Event()
    running = operations.KeyedOperations(pool)

    async def work() -> bool:
        return await workers.run(dead.wait)

    watch = WorkerWatch(pool, running, health)
    with pytest.raises(operations.OperationOverdue):
        await running.run("vol-1", "NodeUnpublishVolume", None, work, limit_s=0)
    await watch.check_threads()
    (problem,) = health.problems.values()
    assert "1 operations of the proxy do not end: NodeUnpublishVolume of vol-1" in str(problem)
    health.check_healthy()
    dead.set()
    await running.idle()
    await watch.check_threads()
    assert health.problems == {}


async def test_unhealthy_part_says_what_hangs_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    health, dead = Health(), threading.Event()
    shim, other = Workers("the shim at /s", limit=5), Workers("the shim at /other", limit=1)
    running = operations.KeyedOperations(shim)

    begun = threading.Semaphore(0)

    def hang() -> None:
        begun.release()
        dead.wait()

    calls = []
    for number in range(5):
        call = running.run(f"vol-{number}", "NodePublishVolume", None, lambda: workers.run(hang))
        calls.append(asyncio.create_task(call))
        assert await asyncio.to_thread(begun.acquire, timeout=50)
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
    watch = WorkerWatch(shim, running, health)
    await watch.check_threads()
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    await WorkerWatch(other, operations.KeyedOperations(other), health).check_threads()
    assert [*health.problems] == ["threads of the shim at /s"]
    with pytest.raises(workers.NoWorkerFree) as caught:
        health.check_healthy()
    sentence = str(caught.value)
    assert sentence.startswith("the shim at /s cannot take more work: none of its 5 threads")
    assert "NodePublishVolume of vol-0, NodePublishVolume of vol-1," in sentence
    assert " and 2 more; check the disks and mounts" in sentence
    dead.set()
    await asyncio.gather(*calls)
    await watch.check_threads()
    assert health.problems == {}


async def test_watch_that_only_shows_fails_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver: dozens of unmounts that write to a slow disk take all threads, and end."""
    pool, health, dead = Workers("the driver", limit=1), Health(), threading.Event()
    hung = asyncio.create_task(pool.run(dead.wait))
    await asyncio.sleep(0)
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
    await WorkerWatch(
        pool, operations.KeyedOperations(pool), health, is_fatal=False
    ).check_threads()
    assert [problem.error_name for problem in health.problems.values()] == ["NoWorkerFree"]
    health.check_healthy()
    dead.set()
    await hung
