"""A node: proxy, shim and driver over real sockets in one process, and a CO's view of it."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import grpc.aio

from crust.core import volumes
from crust.core.settings.proxy import KubernetesSettings, ProxySettings, ServedDriver
from crust.core.settings.shim import ShimSettings
from crust.csi_shim import shim_process
from crust.csi_shim.wrap import node_shim
from crust.handoff import store
from crust.handoff.entry import Entry
from crust.handoff.record import Record
from crust.host.block import devices
from crust.host.process.workers import Workers
from crust.proxy import proxy_process
from crust.proxy.filesystems import Filesystems
from crust.proxy.guard import Devices, Targets
from crust.proxy.target import Stack
from crust.rpc import channel
from crust.rpc.messages import crust_v1
from crust.wire.v1 import inspect_pb2_grpc, runtime_pb2, runtime_pb2_grpc
from tests.support.co import Co
from tests.support.drivers import fake_driver
from tests.support.memory_csi.node import Mounts
from tests.support.nodes.fake_filesystems import FakeFilesystems
from tests.support.nodes.fake_targets import FakeDevices, FakeTargets
from tests.support.runtimes import fake_handler

DRIVER = "csi.example.com"
NAMED = {"crust.dev/runtime-handler": "kata"}
"""Context of a publish that names its handler: right after a start, one without a name waits for the grace's end."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """The proxy's own sockets."""

    runtime: str
    handlers: str
    inspect: str

    @classmethod
    def below(cls, run_dir: str) -> "Sockets":
        """The sockets in the run directory."""
        return cls(f"{run_dir}/runtime.sock", f"{run_dir}/handlers.sock", f"{run_dir}/inspect.sock")


@dataclass(frozen=True)
class Places:
    """The paths of a node, below one short directory (sun_path has 107 bytes)."""

    root: str

    @classmethod
    def make(cls, root: str) -> Self:
        places = cls(root)
        os.mkdir(places.kubelet)
        return places

    @property
    def kubelet(self) -> str:
        return f"{self.root}/kubelet"

    @property
    def run(self) -> str:
        return f"{self.root}/run"

    @property
    def volumes(self) -> str:
        return f"{self.root}/run/volumes"

    @property
    def csi(self) -> str:
        return f"{self.root}/csi.sock"

    @property
    def shim(self) -> str:
        return f"{self.root}/shim.sock"

    @property
    def driver(self) -> str:
        return f"{self.root}/driver.sock"

    @property
    def handler(self) -> str:
        return f"{self.root}/handler.sock"

    @property
    def sizes(self) -> str:
        """Sizes of fake devices, for a proxy in another process."""
        return f"{self.root}/sizes.json"

    @property
    def sockets(self) -> Sockets:
        return Sockets.below(self.run)

    def target(self, name: str) -> str:
        """A target path; its parent exists, as the CO creates it."""
        os.makedirs(f"{self.kubelet}/pods/{name}", exist_ok=True)
        return f"{self.kubelet}/pods/{name}/mount"

    def entries(self) -> list[str]:
        """Every name in the handoff directory but its lock: entries, and what is half-done."""
        return sorted(set(os.listdir(self.volumes)) - {".writer.lock"})

    def arguments(self, driver: str, *, behind: str = "") -> dict[str, tuple[str, ...]]:
        """The command lines of crust for our driver, a shim around it or the driver `behind`, and the proxy."""
        runtime, target_root = self.sockets.runtime, f"--target-root={self.kubelet}"
        return {
            "driver": (
                "driver", f"--socket={self.driver}", f"--state-dir={self.root}/pool/state", "--create-pool",
                f"--run-dir={self.run}/driver", f"--runtime-socket={runtime}", target_root,
            ),
            "shim": (
                "shim", f"--socket={self.shim}", f"--driver-socket={behind or self.driver}",
                f"--runtime-socket={runtime}", f"--kubelet-root={self.kubelet}",
            ),
            "proxy": (
                "proxy", f"--run-dir={self.run}", f"--volumes-root={self.volumes}",
                f"--driver={driver},{self.csi},{self.shim}", target_root,
            ),
        }  # fmt: skip

    def settings(
        self,
        *,
        grace_s: float = 0,
        backend: str = "",
        driver: str = DRIVER,
        defer: str = "",
        kubernetes: KubernetesSettings | None = None,
    ) -> ProxySettings:
        served = ServedDriver.model_validate(
            {"name": driver, "socket": self.csi, "backend": backend or self.shim, "defer": defer}
        )
        return ProxySettings(
            run_dir=self.run,
            volumes_root=self.volumes,
            target_roots=(self.kubelet,),
            drivers=(served,),
            handler_grace_s=grace_s,
            kubernetes=kubernetes,
        )


@dataclass
class Node:
    """A running node."""

    places: Places
    driver: fake_driver.FakeDriver
    targets: Any
    devices: Any
    filesystems: Any
    co: Co
    proxy_channels: dict[str, grpc.aio.Channel]

    @property
    def runtime(self) -> "runtime_pb2_grpc.RuntimeAsyncStub":
        return runtime_pb2_grpc.RuntimeStub(self.proxy_channels["runtime"])

    @property
    def inspect(self) -> "inspect_pb2_grpc.InspectAsyncStub":
        return inspect_pb2_grpc.InspectStub(self.proxy_channels["inspect"])

    def entry(self, target: str) -> Entry | None:
        return store.Store(self.places.volumes).read(volumes.TargetPath(target))

    def record(self, target: str) -> Record:
        """The record of a target, which has one."""
        entry = self.entry(target)
        assert entry is not None
        return entry.require()

    def check_untouched(self, target: str) -> None:
        """Check that there is no entry, hidden or not, no target directory, and nothing published by the driver."""
        assert self.entry(target) is None
        assert self.places.entries() == []
        assert not os.path.lexists(target)
        assert target not in self.driver.published

    def check_published(self, volume_id: str, target: str) -> None:
        """Check that entry, guard mount and the driver's state exist."""
        entry = self.entry(target)
        assert entry is not None
        assert entry.require().key.volume_id == volume_id
        assert self.targets.look(volumes.TargetPath(target)).stack is Stack.GUARD
        assert self.driver.published[target].volume_id == volume_id

    def handler(self, **options: Any) -> Any:
        """A registered handler, as a context manager."""
        fake = options.pop("fake", None) or fake_handler.FakeHandler()
        options.setdefault("endpoint", self.places.handler)
        return fake_handler.running(fake, proxy_socket=self.places.sockets.handlers, **options)

    @asynccontextmanager
    async def deferred(
        self, target: str, fake: fake_handler.FakeHandler | None = None, **options: Any
    ) -> AsyncIterator[fake_handler.FakeHandler]:
        """A registered handler, for which "vol-1" is published at the target."""
        fake = fake or fake_handler.FakeHandler()
        async with self.handler(fake=fake, **options):
            await self.co.publish("vol-1", target)
            yield fake

    @asynccontextmanager
    async def in_sandbox(
        self, target: str, fake: fake_handler.FakeHandler | None = None, **options: Any
    ) -> AsyncIterator[fake_handler.FakeHandler]:
        """As `deferred`, and a sandbox of the handler has the volume."""
        async with self.deferred(target, fake, **options) as handler:
            with self.sandbox(target):
                yield handler

    @asynccontextmanager
    async def gated_handler(
        self, target: str
    ) -> AsyncIterator[tuple[fake_handler.FakeHandler, fake_driver.Gate]]:
        """As `deferred`, and the gate at which the handler waits in each call."""
        gate = fake_driver.Gate()
        async with self.deferred(target, fake_handler.FakeHandler(gate=gate)) as fake:
            yield fake, gate

    def freeze(self, target: str, thaw_after_s: int = 10) -> Any:
        """RuntimeFreezeVolume."""
        request = runtime_pb2.RuntimeFreezeVolumeRequest(
            volume_target_path=target, thaw_after_seconds=thaw_after_s
        )
        return self.runtime.RuntimeFreezeVolume(request, timeout=10)

    def thaw(self, target: str) -> Any:
        """RuntimeThawVolume."""
        request = runtime_pb2.RuntimeThawVolumeRequest(volume_target_path=target)
        return self.runtime.RuntimeThawVolume(request, timeout=10)

    def limit(self, target: str, limits: volumes.IoLimits) -> Any:
        """RuntimeSetVolumeLimits."""
        request = runtime_pb2.RuntimeSetVolumeLimitsRequest(
            volume_target_path=target, limits=crust_v1.io_limits_to_wire(limits)
        )
        return self.runtime.RuntimeSetVolumeLimits(request, timeout=10)

    def sandbox(self, target: str, **options: Any) -> Any:
        """A sandbox that has the volume, as a context manager."""
        return fake_handler.sandbox(self.places.volumes, target, **options)


@asynccontextmanager
async def running(
    places: Places,
    *,
    driver: fake_driver.FakeDriver | None = None,
    grace_s: float = 0,
    targets: Targets | None = None,
    devices: Devices | None = None,
    filesystems: Filesystems | None = None,
    threads: Workers | None = None,
    **settings_: Any,
) -> AsyncIterator[Node]:
    """Driver, shim and proxy, bottom up. Without a kernel, unless `targets`, `devices`, `filesystems` are given."""
    driver = driver or fake_driver.FakeDriver()
    targets = targets or FakeTargets(places.kubelet)
    devices = devices or FakeDevices(identities=driver.identities)
    filesystems = filesystems or FakeFilesystems(places.run)
    async with (
        fake_driver.serving(driver, places.driver),
        proxy_process.running(
            places.settings(grace_s=grace_s, **settings_),
            host=proxy_process.Host(targets, filesystems, devices),
            threads=threads,
        ),
        shim(places),
        channel.connect(places.csi) as co,
        channel.connect(places.sockets.runtime) as runtime,
        channel.connect(places.sockets.inspect) as inspect,
    ):
        sockets = {"runtime": runtime, "inspect": inspect}
        yield Node(places, driver, targets, devices, filesystems, Co(co), sockets)


def running_on(device: str, places: Places, mounts: Mounts | None = None, **of: Any) -> Any:
    """A node on the real kernel: each volume of its driver is the device. `of` has what else `running` takes."""
    driver = fake_driver.FakeDriver(device=device, mounts=mounts)
    targets = Targets([places.kubelet])
    return running(places, driver=driver, targets=targets, devices=devices, **of)


def fake_host(places: Places) -> proxy_process.Host:
    """A host without a kernel, for a proxy alone."""
    targets, filesystems = FakeTargets(places.kubelet), FakeFilesystems(places.run)
    return proxy_process.Host(targets, filesystems, FakeDevices())


def shim(
    places: Places, *, wrapping: node_shim.Wrapping | None = None, threads: Workers | None = None
) -> Any:
    """The shim as a process would serve it."""
    wraps: dict[str, Any] = {"wrap": False}
    if wrapping is not None:
        wraps = {
            "kubelet_root": wrapping.kubelet_root,
            "defer": wrapping.default.value,
            "driver_name": wrapping.driver_name,
        }
    settings = ShimSettings(
        socket=places.shim,
        driver_socket=places.driver,
        runtime_socket=places.sockets.runtime,
        **wraps,
    )
    return shim_process.serving(settings, threads=threads)


async def until(event: asyncio.Event) -> None:
    """Wait for an event, at most as long as a hung test may take."""
    async with asyncio.timeout(60):
        await event.wait()
