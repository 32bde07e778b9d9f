"""A simulated kubelet on a driver of somebody else's, without crust in between."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from tests.support.drivers import fake_driver
from tests.support.drivers.mounting_driver import MountingDriver
from tests.support.kubelet.kubelet import Kubelet
from tests.support.kubelet.mount_points import FakeMountPoints
from tests.support.kubelet.pods import PlainContainers

DRIVER = "csi.example.com"


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
    with tempfile.TemporaryDirectory(prefix="crust-") as path:
        yield path


@pytest.fixture
async def simulated(root: str) -> AsyncIterator[Simulated]:
    """A kubelet whose driver serves; a published target is a mount point."""
    driver, runtime = MountingDriver(f"{root}/sizes.json"), PlainContainers()
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
