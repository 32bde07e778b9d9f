"""A volume whose image hangs in the kernel, under a driver that is a process: nobody else waits for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from crust.host.block import loop
from crust.host.mounts import mountinfo
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import Co, capability
from tests.support.drivers.killed_driver import KilledDriver
from tests.support.faults.hung_files import HungFile
from tests.support.faults.refusals import refused_in_time
from tests.support.records import pool_layout

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

Code = grpc.StatusCode
CAPABILITY = capability(mode="SINGLE_NODE_MULTI_WRITER")
SOON_S = 4
"""The driver answers a little earlier than this."""
LONG_S = 60


async def use(co: Co, root: Path, volume_id: str) -> None:
    """The rest of a volume's life, with a pod's write."""
    target, staging = str(root / volume_id), str(root / "staging")
    await co.publish(volume_id, target, CAPABILITY, defer=False, staging=staging)
    await asyncio.to_thread(Path(target, "file").write_text, "a pod's")
    await co.unpublish(volume_id, target)
    await co.unstage(volume_id, staging)
    await co.delete(volume_id)


async def is_ready(co: Co) -> bool:
    answer = await co.identity.Probe(csi_pb2.ProbeRequest(), timeout=LONG_S)
    return bool(answer.ready.value)


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[KilledDriver]:
    (tmp_path / "staging").mkdir()
    (tmp_path / "pool").mkdir()
    running = KilledDriver(tmp_path)
    await running.start()
    try:
        yield running
    finally:
        await running.kill()
        for device in loop.list_named(lambda name: name.endswith(".img")):
            if device.backing.startswith(str(tmp_path)):
                loop.detach(device)


async def left(connected: grpc.aio.Channel) -> None:
    """Until the server has closed the connection."""
    async with asyncio.timeout(LONG_S):
        while (state := connected.get_state()) is grpc.ChannelConnectivity.READY:
            await connected.wait_for_state_change(state)


async def test_stage_that_hangs_harms_nobody_and_is_awaited(driver: KilledDriver) -> None:
    root, staging = driver.root, str(driver.root / "staging")
    async with channel.connect(driver.socket) as connected:
        co = Co(connected, LONG_S, waits=True)
        dead, well = [(await co.create(name, CAPABILITY)).volume_id for name in ("dead", "well")]
        image = pool_layout.image(root / "pool" / "state", dead)
        with HungFile(image) as hung:
            for _ in range(2):
                await refused_in_time(
                    lambda: co.stage(dead, staging, CAPABILITY, timeout_s=SOON_S),
                    Code.ABORTED,
                    "OperationOverdue",
                )
            await one_hangs(driver)
            assert await is_ready(co)
            await co.stage(well, staging, CAPABILITY)
            await use(co, root, well)
            driver.terminate()
            await left(connected)
            with pytest.raises(TimeoutError):  # it waits for the thread that the kernel keeps
                async with asyncio.timeout(1):
                    await driver.ended()
            hung.end()
            assert await driver.ended() == 0
    assert loop.find(str(image)) == ()
    assert mountinfo.below(str(root)) == ()
    await driver.start()
    async with channel.connect(driver.socket) as connected:
        again = Co(connected, LONG_S, waits=True)
        await again.stage(dead, staging, CAPABILITY)
        await use(again, root, dead)
        assert await is_ready(again)
    assert pool_layout.files(root / "pool" / "state") == set()


async def one_hangs(driver: KilledDriver) -> None:
    """One thread is kept by a system call, so no retry took another; one that only waits for a disk goes on."""
    async with asyncio.timeout(LONG_S):
        while _hanging(driver) != 1:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.05)


def _hanging(driver: KilledDriver) -> int:
    """The driver's threads that the kernel has in a system call which no signal ends."""
    states = []
    for task in Path(f"/proc/{driver.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            text = (task / "status").read_text()
            states += [line.split()[1] for line in text.splitlines() if line.startswith("State:")]
    return states.count("D")
