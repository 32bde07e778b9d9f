"""A simulated kubelet on a driver of somebody else's, without crust in between."""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import FakeDriver
from tests.support.kubelet.kubelet import Kubelet
from tests.support.kubelet.mount_points import FakeMountPoints
from tests.support.kubelet.pods import PlainContainers

DRIVER = "csi.example.com"


class MountingDriver(FakeDriver):
    """Makes and removes its targets, as CSI says. `leaves`: what an unpublish leaves in the target."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = ""
        self.keeps_raw_targets = False

    async def NodePublishVolume(self, request, context):  # type: ignore[no-untyped-def]
        answer = await super().NodePublishVolume(request, context)
        if request.volume_capability.HasField("block"):
            open(request.target_path, "w").close()
        else:
            os.makedirs(request.target_path, exist_ok=True)
        return answer

    async def NodeUnpublishVolume(self, request, context):  # type: ignore[no-untyped-def]
        answer = await super().NodeUnpublishVolume(request, context)
        if os.path.isfile(request.target_path):
            if not self.keeps_raw_targets:
                os.unlink(request.target_path)
        elif self.leaves:
            open(f"{request.target_path}/{self.leaves}", "w").close()
        elif os.path.isdir(request.target_path):
            os.rmdir(request.target_path)
        return answer


@dataclass
class Simulated:
    """A kubelet, the driver that it calls, and the mount points that it sees."""

    kubelet: Kubelet
    driver: MountingDriver
    runtime: PlainContainers
    mount_points: FakeMountPoints

    def methods(self, handle: str = "") -> list[str]:
        """What the driver was asked, less capabilities."""
        return [
            call.method
            for call in self.driver.calls
            if call.method != "NodeGetCapabilities" and call.request.volume_id.startswith(handle)
        ]


@pytest.fixture
def root() -> Iterator[str]:
    """The kubelet's root."""
    with tempfile.TemporaryDirectory(prefix="crust-") as path:
        yield path


@pytest.fixture
async def simulated(root: str) -> AsyncIterator[Simulated]:
    """A kubelet whose driver serves; a published target is a mount point."""
    driver, runtime = MountingDriver(), PlainContainers()
    mount_points = FakeMountPoints(lambda path: path in driver.published)
    kubelet = Kubelet(
        root=f"{root}/kubelet",
        driver=DRIVER,
        socket=f"{root}/csi.sock",
        mount_points=mount_points,
        runtime=runtime,
    )
    async with fake_driver.serving(driver, f"{root}/csi.sock"):
        yield Simulated(kubelet, driver, runtime, mount_points)
