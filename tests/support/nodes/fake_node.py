"""A node with the fake driver and, unless a test gives it the kernel's, fake targets, devices and filesystems."""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from crust.core import volumes
from crust.host.block import devices
from crust.proxy.guard import Targets
from crust.proxy.proxy_process import Host
from crust.proxy.target import MountStack
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import FakeDriver, Gate
from tests.support.memory_csi.node import Mounts
from tests.support.nodes.fake_filesystems import FakeFilesystems
from tests.support.nodes.fake_targets import FakeDevices, FakeTargets
from tests.support.nodes.node import Node
from tests.support.nodes.places import Places
from tests.support.runtimes.fake_handler import FakeHandler

DRIVER = "csi.example.com"


@dataclass
class FakeNode(Node):
    """A node whose driver is fake, and its state outlives the part "driver"; a test chooses its handlers."""

    driver_name: str = field(default=DRIVER, kw_only=True)
    parts: tuple[str, ...] = field(default=("driver", "proxy", "shim", "calls"), kw_only=True)
    driver: FakeDriver = field(default_factory=FakeDriver, kw_only=True)
    targets: Any = field(default=None, kw_only=True)
    devices: Any = field(default=None, kw_only=True)
    filesystems: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.targets = self.targets or FakeTargets(self.places.kubelet)
        self.devices = self.devices or FakeDevices(identities=self.driver.identities)
        if isinstance(self.devices, FakeDevices):
            self.devices.published = self.driver.published
        if isinstance(self.targets, FakeTargets) and isinstance(self.devices, FakeDevices):
            self.targets.devices = self.devices
        self.filesystems = self.filesystems or FakeFilesystems(self.places.run)
        self.host = Host(self.targets, self.filesystems, self.devices)

    def part(self, name: str) -> AbstractAsyncContextManager[Any]:
        if name == "driver":
            return fake_driver.serving(self.driver, self.places.driver)
        return super().part(name)

    def check_untouched(self, target: str) -> None:
        """Check that there is no entry, hidden or not, no target directory, and nothing published by the driver."""
        assert self.entry(target) is None
        assert self.places.entries() == []
        assert not os.path.lexists(target)
        assert target not in self.driver.published

    def check_published(self, volume_id: str, target: str) -> None:
        """Check that entry, guard mount and the driver's state exist."""
        assert self.record(target).key.volume_id == volume_id
        assert self.targets.look(volumes.TargetPath(target)).stack is MountStack.GUARD
        published = self.driver.published[target]
        assert (published.volume_id, published.deferred) == (volume_id, True)

    @asynccontextmanager
    async def deferred(
        self, target: str, fake: FakeHandler | None = None, **options: Any
    ) -> AsyncIterator[FakeHandler]:
        """A registered handler, for which "vol-1" is published at the target."""
        fake = fake or FakeHandler()
        async with self.handler(fake, **options):
            await self.co.publish("vol-1", target)
            yield fake

    @asynccontextmanager
    async def in_sandbox(
        self, target: str, fake: FakeHandler | None = None, **options: Any
    ) -> AsyncIterator[FakeHandler]:
        """As `deferred`, and a sandbox of the handler has the volume."""
        async with self.deferred(target, fake, **options) as handler:
            with self.sandbox(target):
                yield handler

    @asynccontextmanager
    async def gated_handler(self, target: str) -> AsyncIterator[tuple[FakeHandler, Gate]]:
        """As `deferred`, and the gate at which the handler waits in each call."""
        gate = Gate()
        async with self.deferred(target, FakeHandler(gate=gate)) as fake:
            yield fake, gate


def node_on(device: str, places: Places, mounts: Mounts | None = None, **fields: Any) -> FakeNode:
    """A node on the real kernel: each volume of its driver is the device."""
    driver, targets = FakeDriver(device=device, mounts=mounts), Targets([places.kubelet])
    return FakeNode(places, driver=driver, targets=targets, devices=devices, **fields)
