"""Calls while the engine hangs: bounded threads, a typed answer."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.pool_access import Attachment
from crust.core import errors, operations, volumes
from crust.core.operations import SystemCallTimedOut
from crust.host.process import workers
from crust.host.process.workers import NoWorkerFree, Workers
from crust.rpc import status
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import create_request
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import caller
from tests.support.drivers.memory_backend import MemoryBackend

_SOON_S = 0.01
_THREADS = 4


class HangingBackend(MemoryBackend):
    """A backend whose calls hang for the volumes in `dead`, until `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: set[volumes.VolumeId] = set()
        self.released = threading.Event()
        self.hung: Counter[str] = Counter()
        self.more = threading.Condition()

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        self._hang(volume_id)
        return super().attached(volume_id)

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        self._hang(volume_id)
        return super().image_problem(volume_id, size_bytes)

    def wait_for(self, hung: int) -> None:
        """Until so many calls hang. Blocks."""
        with self.more:
            self.more.wait_for(lambda: self.hung.total() >= hung)

    def _hang(self, volume_id: volumes.VolumeId) -> None:
        if volume_id not in self.dead:
            return
        with self.more:
            self.hung[volume_id] += 1
            self.more.notify_all()
        self.released.wait()


@pytest.fixture
def backend() -> Iterator[HangingBackend]:
    engine = HangingBackend()
    yield engine
    engine.released.set()


@pytest.fixture
def driver(tmp_path: Path, backend: HangingBackend) -> Driver:
    threads = Workers("the driver", limit=_THREADS)
    return driver_state.opened(tmp_path, backend=backend, threads=threads)


async def create(driver: Driver, name: str) -> volumes.VolumeId:
    made = await driver.controller.CreateVolume(create_request(name), caller())
    return volumes.VolumeId(made.volume.volume_id)


async def unstage(driver: Driver, volume_id: str, *, left_s: float | None = None) -> None:
    request = csi_pb2.NodeUnstageVolumeRequest(volume_id=volume_id, staging_target_path="/staging")
    await driver.node.NodeUnstageVolume(request, caller("NodeUnstageVolume", left_s=left_s))


async def hang(
    driver: Driver, backend: HangingBackend, count: int, name: str = "dead"
) -> tuple[list[volumes.VolumeId], list[asyncio.Task[None]]]:
    """Volumes whose unstage hangs, each on a thread."""
    dead = [await create(driver, f"{name}-{number}") for number in range(count)]
    before = len(backend.dead)
    backend.dead.update(dead)
    calls = [asyncio.create_task(unstage(driver, volume_id)) for volume_id in dead]
    await asyncio.to_thread(backend.wait_for, before + count)
    return dead, calls


async def probe(driver: Driver) -> bool:
    return (await driver.identity.Probe(csi_pb2.ProbeRequest(), caller())).ready.value


async def test_unstage_that_hangs_takes_one_thread(driver: Driver, backend: HangingBackend) -> None:
    (dead,), (call,) = await hang(driver, backend, 1)
    for _ in range(3 * _THREADS):
        with pytest.raises(operations.OperationOverdue) as caught:
            await unstage(driver, dead, left_s=_SOON_S)
        assert status.branch_of(type(caught.value)) is errors.OperationPending
    assert backend.hung == {dead: 1}
    assert await probe(driver)
    backend.released.set()
    await call


async def test_second_call_beside_one_is_refused(driver: Driver, backend: HangingBackend) -> None:
    (dead,), (call,) = await hang(driver, backend, 1)
    with pytest.raises(operations.OperationInProgress, match="NodeUnstageVolume"):
        await driver.controller.DeleteVolume(csi_pb2.DeleteVolumeRequest(volume_id=dead), caller())
    backend.released.set()
    await call


async def test_engine_whose_threads_hang_refuses_work_and_fails_probe(
    driver: Driver, backend: HangingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = await create(driver, "healthy")
    _, calls = await hang(driver, backend, _THREADS - 1)
    await unstage(driver, healthy)
    calls += (await hang(driver, backend, 1, "last"))[1]
    monkeypatch.setattr(workers, "FREE_WITHIN_S", _SOON_S)
    with pytest.raises(NoWorkerFree, match=f"none of its {_THREADS} threads .* kernel log"):
        await unstage(driver, healthy)
    for call in (
        probe(driver),
        driver.controller.GetCapacity(csi_pb2.GetCapacityRequest(), caller()),
    ):
        with pytest.raises(NoWorkerFree):
            await call
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    backend.released.set()
    await asyncio.gather(*calls)
    await unstage(driver, healthy)
    assert await probe(driver)


async def test_read_that_hangs_takes_one_thread(driver: Driver, backend: HangingBackend) -> None:
    dead, healthy = await create(driver, "dead"), await create(driver, "healthy")
    backend.dead.add(dead)
    get, listing = csi_pb2.ControllerGetVolumeRequest, csi_pb2.ListVolumesRequest()
    for _ in range(10):
        with pytest.raises(SystemCallTimedOut, match="ControllerGetVolume does not answer"):
            await driver.controller.ControllerGetVolume(
                get(volume_id=dead), caller("ControllerGetVolume", left_s=_SOON_S)
            )
        with pytest.raises(SystemCallTimedOut, match="ListVolumes does not answer"):
            await driver.controller.ListVolumes(listing, caller("ListVolumes", left_s=_SOON_S))
    await asyncio.to_thread(backend.wait_for, 2)
    assert backend.hung == {dead: 2}
    answer = await driver.controller.ControllerGetVolume(get(volume_id=healthy), caller())
    assert answer.volume.volume_id == healthy
    assert await probe(driver)
