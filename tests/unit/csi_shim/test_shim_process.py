"""A shim whose threads hang on volumes, and the watchdog."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.csi_shim import shim_process
from crust.csi_shim.wrap import leaves, node_shim, private_directories
from crust.csi_shim.wrap.node_shim import Wrapping
from crust.host.process import systemd, workers
from crust.host.process.workers import Workers
from crust.rpc import channel
from crust.rpc.serving import worker_watch
from crust.rpc.serving.daemon import Daemon
from tests.support.co import Co
from tests.support.drivers.fake_driver import FakeDriver
from tests.support.faults.refusals import refused, until_probe
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

Code = grpc.StatusCode
_THREADS = 3


class Hang:
    """A function of the shim that hangs until `released`."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        self.count = 0

    def __call__(self, *_: Any) -> Any:
        self.count += 1
        self.begun.set()
        self.released.wait()
        raise OSError(5, "the disk came back broken")


@asynccontextmanager
async def small_shim(places: Places, hang: Hang) -> AsyncIterator[tuple[Daemon, grpc.aio.Channel]]:
    """A shim with few threads around a driver that knows nothing of deferral, and a caller."""
    threads, driver = Workers("the shim at /s", limit=_THREADS), FakeDriver(defers=False)
    wrapping = Wrapping(places.kubelet)
    async with (
        FakeNode(places, parts=("driver",), driver=driver, wrapping=wrapping) as node,
        shim_process.serving(node.shim_settings(), threads=threads) as daemon,
        channel.connect(places.shim) as co,
    ):
        try:
            yield daemon, co
        finally:
            hang.released.set()


async def publish(places: Places, co: Co, name: str) -> None:
    staging = f"{places.kubelet}/{name}/globalmount"
    context = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "kata"}
    await co.stage(name, staging, volume_context=context)
    await co.publish(name, places.target(name), staging=staging, volume_context=context)


async def test_shim_whose_threads_hang_is_not_ready_until_one_frees(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hangs in an operation, and the others in looks at directories."""
    monkeypatch.setattr(worker_watch, "CHECK_S", 0.01)
    monkeypatch.setattr(node_shim, "_LOOK_S", 0.01)
    hang = Hang()
    monkeypatch.setattr(leaves, "device", hang)
    async with small_shim(places, hang) as (daemon, co):
        await until_probe(co, Code.OK)
        daemon.check_ready()
        publishing = asyncio.create_task(publish(places, Co(co), "dead-0"))
        assert await asyncio.to_thread(hang.begun.wait, 50)
        monkeypatch.setattr(private_directories, "is_staged", hang)
        for name in [f"dead-{number}" for number in range(1, _THREADS)]:
            for _ in range(2):
                await refused(Co(co).unstage(name, "/s"), Code.UNAVAILABLE, name)
        assert hang.count == _THREADS, "a retry takes no thread"
        monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
        text = await until_probe(co, Code.UNAVAILABLE, "[NoWorkerFree] the shim at /s cannot")
        assert "NodePublishVolume of dead-0" in text
        with pytest.raises(workers.NoWorkerFree, match="the shim at /s"):
            daemon.check_ready()
        monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
        hang.released.set()
        await refused(publishing, Code.INTERNAL)
        await until_probe(co, Code.OK)
        daemon.check_ready()


async def test_shim_tells_no_watchdog_beside_the_proxy(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setattr(systemd, "_send", lambda message, _: sent.append(message))
    async with small_shim(places, Hang()) as (_, co):
        await until_probe(co, Code.OK)
    assert sent == [b"READY=1"]
