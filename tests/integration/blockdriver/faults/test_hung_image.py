"""A volume whose image hangs in the kernel, under a driver that is a process: nobody else waits for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from crust.host.block import loop, loop_devices
from crust.host.mounts import mountinfo
from crust.rpc import channel
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.drivers.block_driver import MIB, mount
from tests.support.drivers.killed_driver import KilledDriver
from tests.support.faults.hung_files import HungFile
from tests.support.faults.refusals import refused_in_time

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

Code = grpc.StatusCode
CAPABILITY = csi.capability_to_wire(mount())
SOON_S = 4
"""The driver answers a little earlier than this."""
LONG_S = 60


class Co:
    """Calls of a CO, with one staging path and one target for each volume."""

    def __init__(self, root: Path, connected: grpc.aio.Channel) -> None:
        self.root = root
        self.controller = csi_pb2_grpc.ControllerStub(connected)
        self.node = csi_pb2_grpc.NodeStub(connected)
        self.identity = csi_pb2_grpc.IdentityStub(connected)

    async def create(self, name: str) -> str:
        request = csi_pb2.CreateVolumeRequest(
            name=name,
            volume_capabilities=[CAPABILITY],
            capacity_range=csi_pb2.CapacityRange(required_bytes=64 * MIB),
        )
        answer = await self.controller.CreateVolume(request, wait_for_ready=True, timeout=LONG_S)
        return answer.volume.volume_id

    async def stage(self, volume_id: str, timeout_s: float = LONG_S) -> None:
        request = csi_pb2.NodeStageVolumeRequest(
            volume_id=volume_id,
            staging_target_path=str(self.root / "staging"),
            volume_capability=CAPABILITY,
        )
        await self.node.NodeStageVolume(request, wait_for_ready=True, timeout=timeout_s)

    async def use(self, volume_id: str) -> None:
        """The rest of its life, with a pod's write."""
        target, staging = str(self.root / volume_id), str(self.root / "staging")
        await self.node.NodePublishVolume(
            csi_pb2.NodePublishVolumeRequest(
                volume_id=volume_id,
                staging_target_path=staging,
                target_path=target,
                volume_capability=CAPABILITY,
            ),
            timeout=LONG_S,
        )
        await asyncio.to_thread(Path(target, "file").write_text, "a pod's")
        unpublish = csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=target)
        await self.node.NodeUnpublishVolume(unpublish, timeout=LONG_S)
        unstage = csi_pb2.NodeUnstageVolumeRequest(volume_id=volume_id, staging_target_path=staging)
        await self.node.NodeUnstageVolume(unstage, timeout=LONG_S)
        delete = csi_pb2.DeleteVolumeRequest(volume_id=volume_id)
        await self.controller.DeleteVolume(delete, timeout=LONG_S)

    async def is_ready(self) -> bool:
        answer = await self.identity.Probe(csi_pb2.ProbeRequest(), timeout=LONG_S)
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
        for device in loop_devices.list_named(lambda name: name.endswith(".img")):
            if device.backing.startswith(str(tmp_path)):
                loop.detach(device)


async def left(connected: grpc.aio.Channel) -> None:
    """Until the server has closed the connection."""
    async with asyncio.timeout(LONG_S):
        while (state := connected.get_state()) is grpc.ChannelConnectivity.READY:
            await connected.wait_for_state_change(state)


async def test_stage_of_a_volume_that_hangs_harms_nobody_and_a_stop_waits_for_it(
    driver: KilledDriver,
) -> None:
    root = driver.root
    async with channel.connect(driver.socket) as connected:
        co = Co(root, connected)
        dead, well = await co.create("dead"), await co.create("well")
        image = root / "pool" / "state" / "images" / f"{dead}.img"
        with HungFile(image) as hung:
            for _ in range(2):
                await refused_in_time(
                    lambda: co.stage(dead, SOON_S), Code.ABORTED, "OperationOverdue"
                )
            await one_hangs(driver)
            assert await co.is_ready()
            await co.stage(well)
            await co.use(well)
            driver.terminate()
            await left(connected)
            with pytest.raises(TimeoutError):  # it waits for the thread that the kernel keeps
                async with asyncio.timeout(1):
                    await driver.ended()
            hung.end()
            assert await driver.ended() == 0
    assert loop_devices.find(str(image)) == ()
    assert mountinfo.below(str(root)) == ()
    await driver.start()
    async with channel.connect(driver.socket) as connected:
        again = Co(root, connected)
        await again.stage(dead)
        await again.use(dead)
        assert await again.is_ready()
    assert not any(image.parent.iterdir())


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
