"""Calls of a driver that hang, and the shim's threads."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.csi_shim.wrap import leaves, private_directories, volume_operations
from tests.integration.wrap.conftest import Wrapped
from tests.support.faults.refusals import refused, refused_in_time

pytestmark = pytest.mark.root


Code = grpc.StatusCode


class Hang:
    """Calls that hang until the end of the test, by one of their arguments."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.release = threading.Event()

    def around(self, function: Callable[..., Any], wanted: str) -> Callable[..., Any]:
        """The function, which hangs if it is called for `wanted`."""

        def call(*args: Any) -> Any:
            if wanted in map(str, args):
                self.begun.append(wanted)
                self.release.wait()
            return function(*args)

        return call


@pytest.fixture
def hang() -> Iterator[Hang]:
    hang = Hang()
    yield hang
    hang.release.set()


async def lives(node: Wrapped, name: str) -> None:
    """Another volume, from its stage to its end."""
    volume, target = await node.volume(name), node.target(name)
    for step in node.life(volume, target).values():
        await step()
    await node.delete_volume(volume.volume_id)


async def test_look_at_a_staging_path_that_hangs_takes_one_thread(
    cloud: Wrapped, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = await cloud.volume()
    monkeypatch.setattr(volume_operations, "_LOOK_S", 0.2)
    around = hang.around(private_directories.is_mounted, cloud.staging(volume))
    monkeypatch.setattr(private_directories, "is_mounted", around)
    for _ in range(4):
        await refused(
            cloud.stage(volume), Code.UNAVAILABLE, "SystemCallTimedOut", volume.volume_id[:40]
        )
    assert len(hang.begun) == 1
    await lives(cloud, "pvc-2")
    hang.release.set()
    await cloud.stage(volume)


async def test_operation_on_a_device_that_hangs_takes_one_thread(
    cloud: Wrapped, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, target = await cloud.staged_volume()
    around = hang.around(leaves.device, cloud.paths(volume).leaf(target))
    monkeypatch.setattr(leaves, "device", around)
    for _ in range(3):
        await refused_in_time(
            lambda: cloud.publish(volume, target, timeout_s=1), Code.ABORTED, "OperationOverdue"
        )
    await refused(cloud.unpublish(volume, target), Code.ABORTED, "NodePublishVolume")
    assert len(hang.begun) == 1
    await lives(cloud, "pvc-2")
    hang.release.set()
    await cloud.publish(volume, target)
