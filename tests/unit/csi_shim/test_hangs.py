"""A shim whose threads all hang on a wrapped driver's volumes: it is not ready, says so by name, and recovers."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.csi_shim.wrap import leaves, private_directories, volume_operations
from crust.csi_shim.wrap.node_shim import Wrapping
from crust.host.process import systemd, workers
from crust.host.process.workers import Workers
from crust.rpc import channel
from crust.rpc.serving import worker_watch
from crust.rpc.serving.daemon import Daemon
from tests.support.co import Co
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import FakeDriver
from tests.support.faults.refusals import refused, until_probe
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Places
from tests.support.nodes.worker_watches import watch_locked

Code = grpc.StatusCode
_THREADS = 3


class Hang:
    """A function of the shim that hangs until `released`."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.count = 0
        self._begun = threading.Semaphore(0)

    def __call__(self, *_: Any) -> Any:
        self.count += 1
        self._begun.release()
        self.released.wait()
        raise OSError(5, "the disk came back broken")

    async def begins(self) -> None:
        assert await asyncio.to_thread(self._begun.acquire, timeout=50)


@pytest.fixture
def places() -> Any:
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        yield Places.make(root)


@asynccontextmanager
async def shim(places: Places, hang: Hang) -> AsyncIterator[tuple[Daemon, grpc.aio.Channel]]:
    """A shim with few threads around a driver that knows nothing of deferral, and a caller."""
    threads, driver = Workers("the shim at /s", limit=_THREADS), FakeDriver(defers=False)
    wraps = Wrapping(places.kubelet)
    async with (
        fake_driver.serving(driver, places.driver),
        nodes.shim(places, wrapping=wraps, threads=threads) as daemon,
        channel.connect(places.shim) as co,
    ):
        try:
            yield daemon, co
        finally:
            hang.released.set()


async def publish(places: Places, co: grpc.aio.Channel, name: str) -> None:
    staging = f"{places.kubelet}/{name}/globalmount"
    context = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "kata"}
    await Co(co).stage(name, staging, volume_context=context)
    await Co(co).publish(name, places.target(name), staging=staging, volume_context=context)


async def test_shim_whose_threads_hang_is_not_ready_until_one_frees(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "CHECK_S", 0.01)
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    checks, hang = watch_locked(monkeypatch), Hang()
    monkeypatch.setattr(leaves, "device", hang)
    async with shim(places, hang) as (daemon, co):
        await until_probe(co, Code.OK)
        daemon.check_ready()
        calls = []
        async with checks:
            for number in range(_THREADS):
                calls.append(asyncio.create_task(publish(places, co, f"dead-{number}")))
                await hang.begins()
            monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
        text = await until_probe(co, Code.UNAVAILABLE, "[NoWorkerFree] the shim at /s cannot")
        assert f"none of its {_THREADS} threads" in text
        assert "NodePublishVolume of dead-0" in text
        assert "check the disks and mounts" in text
        with pytest.raises(workers.NoWorkerFree, match="the shim at /s"):
            daemon.check_ready()
        await refused(publish(places, co, "vol-2"), Code.UNAVAILABLE, "the shim at /s cannot")
        monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
        hang.released.set()
        for call in calls:
            await refused(call, Code.INTERNAL)
        await until_probe(co, Code.OK)
        daemon.check_ready()


async def test_shim_whose_looks_hang_is_not_ready_until_one_ends(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "CHECK_S", 0.01)
    monkeypatch.setattr(volume_operations, "_LOOK_S", 0.01)
    hang = Hang()
    monkeypatch.setattr(private_directories, "is_staged", hang)
    async with shim(places, hang) as (daemon, co):
        for name in [f"dead-{number}" for number in range(_THREADS)]:
            for _ in range(2):
                await refused(Co(co).unstage(name, "/s"), Code.UNAVAILABLE, name)
        assert hang.count == _THREADS, "a retry takes no thread"
        monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
        await until_probe(co, Code.UNAVAILABLE, "[NoWorkerFree] the shim at /s cannot")
        with pytest.raises(workers.NoWorkerFree):
            daemon.check_ready()
        hang.released.set()
        await until_probe(co, Code.OK)


async def test_shim_tells_no_watchdog_beside_the_proxy(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setattr(systemd, "_send", lambda message, _: sent.append(message))
    async with shim(places, Hang()) as (_, co):
        await until_probe(co, Code.OK)
    assert sent == [b"READY=1"]
