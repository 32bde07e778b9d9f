"""A node whose driver knows nothing of crust: the driver as a process, shim and proxy around it, and a CO."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from crust.core import deferral_keys, volumes
from crust.core.settings.program import ProgramSettings
from crust.csi_shim.wrap.frontend import Wrapping
from crust.csi_shim.wrap.private_directories import PrivatePaths
from crust.handoff import store
from crust.host.block import devices, loop, loop_devices
from crust.host.mounts import mount_api, mountinfo
from crust.node import process as node_process
from crust.node.settings import NodeSettings
from crust.proxy import app as proxy_app
from crust.proxy import guard
from crust.rpc import channel
from crust.runtime_handler import claim_volume
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.drivers import cloud, disks
from tests.support.co import Co, capability, publish_request, stage_request
from tests.support.drivers import vendor_driver
from tests.support.drivers.vendor_driver import NAMES
from tests.support.nodes import node as nodes
from tests.support.nodes import proxy_process
from tests.support.nodes.node import Places
from tests.support.runtimes.fake_handler import FakeHandler, running

ATTACHING = {"cloud", "stateful"}
"""Drivers that attach in ControllerPublishVolume, and stage."""
DEFERRED = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "kata"}
NAMED = {"crust.dev/runtime-handler": "kata"}
SECRETS = {"token": cloud.TOKEN}
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Volume:
    """A volume as a CO knows it."""

    volume_id: str
    context: dict[str, str]
    publish_context: dict[str, str]
    capability: csi_pb2.VolumeCapability


@dataclass
class Wrapped:
    """The processes of the node, and its CO."""

    places: Places
    driver: vendor_driver.VendorDriver
    default: deferral_keys.Defer = deferral_keys.Defer.NEVER
    driver_name: str = ""
    """What the shim is told; it asks the driver if it is told none."""
    daemons: AsyncExitStack = field(default_factory=AsyncExitStack)
    shim: AsyncExitStack = field(default_factory=AsyncExitStack)
    co: grpc.aio.Channel = field(init=False)
    is_one_process: bool = False
    """Whether proxy and shim are one process: then the shim cannot end alone."""

    async def start(self) -> None:
        """Proxy, shim and a handler."""
        enter = self.daemons.enter_async_context
        if self.is_one_process:
            await enter(node_process.running(self.node_settings()))
        else:
            await self._start_parts()
        handlers = self.places.sockets.handlers
        await enter(running(FakeHandler(), proxy_socket=handlers, endpoint=self.places.handler))
        self.co = await enter(channel.connect(self.places.csi))

    async def _start_parts(self) -> None:
        guarded = guard.GuardedTargets([self.places.kubelet])
        settings = self.places.settings(grace_s=10, driver=NAMES[self.driver.kind])
        proxy = proxy_app.running(settings, targets=guarded, devices=devices)
        await self.daemons.enter_async_context(proxy)
        await self.start_shim()

    def node_settings(self, **process_: Any) -> NodeSettings:
        """The settings of one process with proxy and shim."""
        proxy = self.places.settings(grace_s=10, driver=NAMES[self.driver.kind])
        shim = {
            "socket": self.places.shim,
            "driver_socket": self.driver.socket,
            "kubelet_root": self.places.kubelet,
            "defer": self.default.value,
        }
        own = set(ProgramSettings.model_fields)
        tables = {"proxy": proxy.model_dump(exclude=own), "shim": shim}
        return NodeSettings.model_validate({**tables, **process_})

    async def start_shim(self) -> None:
        """The shim alone, with nothing in its memory."""
        shim = nodes.shim(self.places, wrapping=self.wrapping)
        await self.shim.enter_async_context(shim)

    async def stop_shim(self) -> None:
        """It ends, and what it has in memory with it."""
        await self.shim.aclose()
        self.shim = AsyncExitStack()

    async def restart_shim(self) -> None:
        """It forgets what it had in memory."""
        await self.stop_shim()
        await self.start_shim()

    async def killable_shim(self, *, die_at: int = proxy_process.NEVER) -> proxy_process.Killable:
        """A shim in a process of its own, in place of the other one."""
        await self.stop_shim()
        shim = proxy_process.running_shim(self.places, wrapping=self.wrapping, die_at=die_at)
        return await self.shim.enter_async_context(shim)

    @property
    def wrapping(self) -> Wrapping:
        """How the shim wraps."""
        return Wrapping(self.places.kubelet, self.default, self.driver_name)

    async def reboot(self) -> None:
        """Mounts, mappings, processes and /run are gone; what is on the disk is there."""
        await self.stop_shim()
        await self.daemons.aclose()
        self.daemons = AsyncExitStack()
        await asyncio.to_thread(self.driver.kill)
        await asyncio.to_thread(tidy, self.places.root)
        await asyncio.to_thread(shutil.rmtree, self.places.run)
        await asyncio.to_thread(self.driver.start)
        await self.start()

    async def attach(self, volume: Volume) -> Volume:
        """ControllerPublishVolume, as after a reboot."""
        if self.driver.kind not in ATTACHING:
            return volume
        request = csi_pb2.ControllerPublishVolumeRequest(
            volume_id=volume.volume_id,
            node_id=vendor_driver.NODE,
            volume_capability=volume.capability,
        )
        answer = await self.controller.ControllerPublishVolume(request, timeout=TIMEOUT_S)
        return replace(volume, publish_context=dict(answer.publish_context))

    @property
    def node(self) -> "csi_pb2_grpc.NodeAsyncStub":
        """The Node service, as a kubelet calls it."""
        return csi_pb2_grpc.NodeStub(self.co)

    @property
    def controller(self) -> "csi_pb2_grpc.ControllerAsyncStub":
        """The driver's Controller service."""
        return csi_pb2_grpc.ControllerStub(self.co)

    def paths(self, volume: Volume) -> PrivatePaths:
        """Where it is staged and published as block."""
        driver = volumes.DriverName(NAMES[self.driver.kind])
        key = volumes.VolumeKey(driver, volumes.VolumeId(volume.volume_id))
        return PrivatePaths.of(self.places.kubelet, key)

    def staging(self, volume: Volume) -> str:
        """The kubelet's staging path, which it makes."""
        name = f"{len(volume.volume_id)}-{volume.volume_id[-20:].replace('/', '_')}"
        path = (
            f"{self.places.kubelet}/plugins/kubernetes.io/csi/{self.driver.kind}/{name}/globalmount"
        )
        os.makedirs(path, 0o750, exist_ok=True)
        return path

    def target(self, pod: str) -> str:
        """A target path, whose parent the kubelet makes."""
        path = f"{self.places.kubelet}/pods/{pod}/volumes/kubernetes.io~csi/pvc-1"
        os.makedirs(path, 0o750, exist_ok=True)
        return f"{path}/mount"

    async def volume(
        self,
        name: str = "pvc-1",
        *,
        context: dict[str, str] | None = None,
        of: csi_pb2.VolumeCapability | None = None,
        mkfs: bool = True,
    ) -> Volume:
        """A new volume, attached; with an ext4 that somebody made."""
        wanted = of or capability()
        given = DEFERRED if context is None else context
        # as the controller's shim asks for it: one driver fixes the kind then
        created = capability(block=True) if given.get("crust.dev/defer") == "always" else wanted
        made = await Co(self.co).create(name, created)
        if mkfs:
            image = max(self.driver.images(), key=os.path.getmtime)
            await asyncio.to_thread(disks.run, "mkfs.ext4", "-q", image)
        given = {**made.volume_context, **given}
        return await self.attach(Volume(made.volume_id, given, {}, wanted))

    @property
    def stages(self) -> bool:
        """Whether a kubelet stages volumes of this driver."""
        return self.driver.kind in ATTACHING

    def stage_request(
        self, volume: Volume, secrets: dict[str, str] | None = None
    ) -> csi_pb2.NodeStageVolumeRequest:
        """NodeStageVolume."""
        return stage_request(
            volume.volume_id,
            self.staging(volume),
            volume.capability,
            publish_context=volume.publish_context,
            secrets=SECRETS if secrets is None else secrets,
            volume_context=volume.context,
        )

    async def stage(self, volume: Volume, secrets: dict[str, str] | None = None) -> None:
        """NodeStageVolume, if the driver stages."""
        if self.stages:
            request = self.stage_request(volume, secrets)
            await self.node.NodeStageVolume(request, timeout=TIMEOUT_S)

    async def unstage(self, volume: Volume) -> None:
        """NodeUnstageVolume, if the driver stages."""
        if self.stages:
            await Co(self.co).unstage(volume.volume_id, self.staging(volume))

    def publish_request(
        self, volume: Volume, target: str, *, flag: bool = False, **fields: Any
    ) -> csi_pb2.NodePublishVolumeRequest:
        """NodePublishVolume."""
        context = {**volume.context, "csi.storage.k8s.io/pod.name": "pod"}
        return publish_request(
            volume.volume_id,
            target,
            volume.capability,
            defer=flag,
            staging=self.staging(volume) if self.stages else "",
            publish_context=volume.publish_context,
            volume_context=context,
            **fields,
        )

    async def publish(
        self,
        volume: Volume,
        target: str,
        *,
        flag: bool = False,
        timeout_s: float = TIMEOUT_S,
        **fields: Any,
    ) -> None:
        """NodePublishVolume."""
        request = self.publish_request(volume, target, flag=flag, **fields)
        await self.node.NodePublishVolume(request, timeout=timeout_s)

    async def unpublish(self, volume: Volume, target: str) -> None:
        """NodeUnpublishVolume."""
        await Co(self.co).unpublish(volume.volume_id, target)

    async def expand(self, volume: Volume, target: str, size: int) -> int:
        """ControllerExpandVolume and NodeExpandVolume."""
        wanted = csi_pb2.CapacityRange(required_bytes=size)
        grow = csi_pb2.ControllerExpandVolumeRequest(
            volume_id=volume.volume_id, capacity_range=wanted, volume_capability=volume.capability
        )
        await self.controller.ControllerExpandVolume(grow, timeout=TIMEOUT_S)
        request = csi_pb2.NodeExpandVolumeRequest(
            volume_id=volume.volume_id,
            volume_path=target,
            staging_target_path=self.staging(volume),
            capacity_range=wanted,
            volume_capability=volume.capability,
        )
        return (await self.node.NodeExpandVolume(request, timeout=TIMEOUT_S)).capacity_bytes

    async def delete(self, volume: Volume) -> None:
        """Detach and delete it."""
        if self.driver.kind in ATTACHING:
            detach = csi_pb2.ControllerUnpublishVolumeRequest(volume_id=volume.volume_id)
            await self.controller.ControllerUnpublishVolume(detach, timeout=TIMEOUT_S)
        await Co(self.co).delete(volume.volume_id)

    def life(self, volume: Volume, target: str) -> dict[str, Callable[[], Awaitable[None]]]:
        """What a kubelet calls for a volume, from its stage to its unstage."""
        return {
            "NodeStageVolume": lambda: self.stage(volume),
            "NodePublishVolume": lambda: self.publish(volume, target),
            "NodeUnpublishVolume": lambda: self.unpublish(volume, target),
            "NodeUnstageVolume": lambda: self.unstage(volume),
        }

    @contextmanager
    def sandbox(self, target: str) -> Iterator[str]:
        """A sandbox that has the volume: it holds lock and device as a VM does. Yields the device."""
        claim = claim_volume(
            self.places.volumes,
            volumes.TargetPath(target),
            volumes.SandboxId("box-1"),
            volumes.HandlerName("kata"),
            features=frozenset(volumes.HandlerFeature),
        )
        with claim:
            yield claim.record.device

    async def survives(self, call: Awaitable[None]) -> bool:
        """Whether the shim lives to answer a call."""
        try:
            await call
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True

    def entry(self, target: str) -> store.Entry | None:
        """The handoff's entry."""
        return store.Store(self.places.volumes).read(volumes.TargetPath(target))

    def check_unpublished(self, volume: Volume, target: str) -> None:
        """Nothing of a publish is there."""
        assert self.entry(target) is None
        assert self.places.entries() == []
        assert not os.path.lexists(target)
        assert not os.path.lexists(self.paths(volume).published)
        staging = self.paths(volume).staging
        mounts = [each.target for each in mountinfo.below(self.places.kubelet)]
        assert [each for each in mounts if not each.startswith(f"{staging}/")] == []

    async def check_gone(self, volume: Volume, target: str) -> None:
        """Nothing of the volume is on the node once it is unstaged and deleted."""
        self.check_unpublished(volume, target)
        assert not os.path.lexists(self.paths(volume).staging)
        assert mountinfo.below(self.places.kubelet) == ()
        await self.delete(volume)
        assert self.driver.attached() == []


@asynccontextmanager
async def node_with(
    kind: str,
    *,
    default: deferral_keys.Defer = deferral_keys.Defer.NEVER,
    is_one_process: bool = False,
) -> AsyncIterator[Wrapped]:
    """A node that serves."""
    with (
        tempfile.TemporaryDirectory(prefix="crust-") as root,
        vendor_driver.running(kind, root) as driver,
    ):
        wrapped = Wrapped(Places.make(root), driver, default, is_one_process=is_one_process)
        await wrapped.start()
        try:
            yield wrapped
        finally:
            driver.release()
            await wrapped.shim.aclose()
            await wrapped.daemons.aclose()
            await asyncio.to_thread(tidy, root)


def tidy(root: str) -> None:
    """Clean up after a failed test."""
    for mount in sorted(mountinfo.below(root), key=lambda each: -len(each.target)):
        mount_api.unmount(mount.target)
    for device in loop_devices.list_all():
        if device.backing.startswith(f"{root}/"):
            loop.detach(device)


@pytest.fixture(params=["cloud", "minimal", "stateful"])
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Wrapped]:
    """With each of the three drivers."""
    async with node_with(request.param) as running_node:
        yield running_node


@pytest.fixture
async def cloud_node() -> AsyncIterator[Wrapped]:
    """With the strict driver."""
    async with node_with("cloud") as running_node:
        yield running_node


@pytest.fixture
def image_root() -> Iterator[Path]:
    """A directory for images."""
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        yield Path(root)


@pytest.fixture
async def stateful_node() -> AsyncIterator[Wrapped]:
    """With the driver that keeps an account of where each volume is."""
    async with node_with("stateful") as running_node:
        yield running_node
