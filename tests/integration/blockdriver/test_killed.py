"""The driver as a process, killed with -9 again and again under a dozen callers: no leak and no lost byte."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.host import loop, mounts
from crust.rpc import channel, csi
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.block_driver import MIB, mount

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

_CALLERS = 12
_LIVES = 3
_KILLS = 12
_RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,  # a formatter of a killed driver still has the device
)


class Killed:
    """A driver process that is started again whenever it was killed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls = asyncio.Condition()
        self.answered = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        arguments = {
            "socket": "csi.sock",
            "state-dir": "state",
            "run-dir": "run",
            "target-root": ".",
        }
        flags = [f"--{name}={(self.root / path).resolve()}" for name, path in arguments.items()]
        program = "from crust.cli.main import main; main()"
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, "driver", "--log-level=error", *flags)
        )

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def count(self) -> None:
        async with self.calls:
            self.answered += 1
            self.calls.notify_all()

    async def wait_for(self, answered: int) -> None:
        async with self.calls:
            await self.calls.wait_for(lambda: self.answered >= answered)


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[Killed]:
    (tmp_path / "pods").mkdir()
    running = Killed(tmp_path)
    await running.start()
    yield running
    await running.kill()


async def call(driver: Killed, method: Callable[..., Awaitable[Any]], request: Any) -> Any:
    """As a CO calls: until there is an answer."""
    for _ in range(500):
        try:
            answer = await method(request, wait_for_ready=True, timeout=30)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _RETRIED:
                raise
            await asyncio.sleep(0.02)  # a CO's back-off
        else:
            await driver.count()
            return answer
    raise AssertionError(f"no answer to {request}")


async def life(driver: Killed, connected: grpc.aio.Channel, number: int) -> None:
    controller, node = csi_pb2_grpc.ControllerStub(connected), csi_pb2_grpc.NodeStub(connected)
    capability = csi.capability_to_wire(mount())
    staging, pod = driver.root / f"staging-{number}", driver.root / "pods" / str(number)
    staging.mkdir()
    pod.mkdir()
    target = str(pod / "mount")
    create = csi_pb2.CreateVolumeRequest(
        name=f"pvc-{number}",
        volume_capabilities=[capability],
        capacity_range=csi_pb2.CapacityRange(required_bytes=32 * MIB),
    )
    volume_id = (await call(driver, controller.CreateVolume, create)).volume.volume_id
    place = {"volume_id": volume_id, "staging_target_path": str(staging)}
    for turn in range(_LIVES):
        stage = csi_pb2.NodeStageVolumeRequest(**place, volume_capability=capability)
        await call(driver, node.NodeStageVolume, stage)
        publish = csi_pb2.NodePublishVolumeRequest(
            **place, target_path=target, volume_capability=capability
        )
        await call(driver, node.NodePublishVolume, publish)
        check_and_write(Path(target) / "diary", number, turn)
        unpublish = csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=target)
        await call(driver, node.NodeUnpublishVolume, unpublish)
        publish.defer_fs_ops = True
        granted = (await call(driver, node.NodePublishVolume, publish)).deferred_mount
        assert granted.capacity_bytes == 32 * MIB
        await call(driver, node.NodeUnpublishVolume, unpublish)
        await call(driver, node.NodeUnstageVolume, csi_pb2.NodeUnstageVolumeRequest(**place))
    delete = csi_pb2.DeleteVolumeRequest(volume_id=volume_id)
    await call(driver, controller.DeleteVolume, delete)


def check_and_write(diary: Path, number: int, turn: int) -> None:
    assert os.path.ismount(diary.parent)
    written = diary.read_text() if turn else ""
    assert written == "".join(f"{number}:{earlier}\n" for earlier in range(turn))
    with diary.open("a") as file:
        file.write(f"{number}:{turn}\n")
        file.flush()
        os.fsync(file.fileno())


async def test_no_leak_and_no_lost_byte_however_often_the_driver_is_killed(driver: Killed) -> None:
    connected = channel.connect(str(driver.root / "csi.sock"))
    lives = asyncio.gather(*(life(driver, connected, number) for number in range(_CALLERS)))
    total = _CALLERS * (2 + 6 * _LIVES)
    async with asyncio.timeout(90):
        for kill in range(1, _KILLS + 1):
            await driver.wait_for(kill * total // (_KILLS + 1))
            await driver.kill()
            await driver.start()
        await lives
    await connected.close()
    assert mounts.below(str(driver.root)) == ()
    assert [each for each in loop.list_all() if str(driver.root) in each.backing] == []
    assert list(driver.root.glob("state/images/*")) == []
    assert [path for path in driver.root.glob("run/*/*/*") if path.suffix == ".json"] == []
