"""crust's own driver, wrapped: its native deferral switched off, or on and off by an upgrade and a downgrade."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from crust import volumes
from crust.blockdriver import app as driver_app
from crust.blockdriver import serve
from crust.csi_shim.frontend import Wrapping
from crust.handoff import store
from crust.host.block import devices
from crust.host.mounts import mountinfo
from crust.proxy import app as proxy_app
from crust.proxy import targets
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.integration.wrap.conftest import DEFERRED, MIB, capability, tidy
from tests.support import node as nodes
from tests.support import without_deferral
from tests.support.fake_handler import FakeHandler, running
from tests.support.node import Places

pytestmark = pytest.mark.root
DRIVER = "block.csi.crust.dev"
RAW = capability(block=True)
MOUNT = capability()


@dataclass
class OwnNode:
    """Proxy, shim and our driver, of which a CO sees either version."""

    places: Places
    parts: AsyncExitStack = field(default_factory=AsyncExitStack)
    version: AsyncExitStack = field(default_factory=AsyncExitStack)
    co: grpc.aio.Channel = field(init=False)

    async def start(self) -> None:
        """All but the driver's socket, which `upgrade` serves."""
        root, enter = self.places.root, self.parts.enter_async_context
        built = driver_app.build(
            create_pool=True,
            state_dir=f"{root}/state",
            run_dir=f"{root}/driver-run",
            node_id="node-1",
            target_roots=(self.places.kubelet,),
        )
        serving = serve.running(
            built,
            socket=f"{root}/newer.sock",
            run_dir=f"{root}/driver-run",
        )
        await enter(serving)
        await self.run_version(defers=False)
        settings = self.places.settings(grace_s=10, driver=DRIVER)
        guarded = targets.GuardedTargets([self.places.kubelet])
        await enter(proxy_app.running(settings, targets=guarded, devices=devices))
        await enter(nodes.shim(self.places, wrapping=Wrapping(self.places.kubelet)))
        handlers = self.places.sockets.handlers
        await enter(running(FakeHandler(), proxy_socket=handlers, endpoint=self.places.handler))
        self.co = await enter(channel.connect(self.places.csi))

    async def run_version(self, *, defers: bool) -> None:
        """The driver is replaced by another version."""
        await self.version.aclose()
        self.version = AsyncExitStack()
        newer = f"{self.places.root}/newer.sock"
        if os.path.lexists(self.places.driver):
            os.unlink(self.places.driver)
        if defers:
            os.symlink(newer, self.places.driver)
        else:
            await self.version.enter_async_context(
                without_deferral.serving(newer, self.places.driver)
            )

    @property
    def node(self) -> "csi_pb2_grpc.NodeAsyncStub":
        return csi_pb2_grpc.NodeStub(self.co)

    async def volume(self, of: csi_pb2.VolumeCapability) -> str:
        request = csi_pb2.CreateVolumeRequest(
            name="pvc-1",
            volume_capabilities=[of],
            capacity_range=csi_pb2.CapacityRange(required_bytes=64 * MIB),
        )
        stub = csi_pb2_grpc.ControllerStub(self.co)
        return (await stub.CreateVolume(request, timeout=30)).volume.volume_id

    def staging(self) -> str:
        path = f"{self.places.kubelet}/plugins/kubernetes.io/csi/own/1/globalmount"
        os.makedirs(path, exist_ok=True)
        return path

    async def stage(self, volume_id: str) -> None:
        request = csi_pb2.NodeStageVolumeRequest(
            volume_id=volume_id,
            staging_target_path=self.staging(),
            volume_capability=MOUNT,
            volume_context=DEFERRED,
        )
        await self.node.NodeStageVolume(request, timeout=30)

    async def publish(self, volume_id: str, target: str) -> None:
        request = csi_pb2.NodePublishVolumeRequest(
            volume_id=volume_id,
            staging_target_path=self.staging(),
            target_path=target,
            volume_capability=MOUNT,
            volume_context=DEFERRED,
        )
        await self.node.NodePublishVolume(request, timeout=30)

    async def take_down(self, volume_id: str, target: str) -> None:
        unpublish = csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=target)
        await self.node.NodeUnpublishVolume(unpublish, timeout=30)
        unstage = csi_pb2.NodeUnstageVolumeRequest(
            volume_id=volume_id, staging_target_path=self.staging()
        )
        await self.node.NodeUnstageVolume(unstage, timeout=30)

    def private(self) -> list[str]:
        """The private directories."""
        above = f"{self.places.kubelet}/plugins/kubernetes.io/csi/volumeDevices/staging"
        return os.listdir(above) if os.path.isdir(above) else []

    def device(self, target: str) -> str:
        entry = store.Store(self.places.volumes).read(volumes.TargetPath(target))
        assert entry is not None
        return entry.require().device

    async def check_gone(self, volume_id: str) -> None:
        assert mountinfo.below(self.places.kubelet) == ()
        assert self.places.entries() == []
        assert self.private() == []
        request = csi_pb2.DeleteVolumeRequest(volume_id=volume_id)
        await csi_pb2_grpc.ControllerStub(self.co).DeleteVolume(request, timeout=30)


@pytest.fixture
async def own() -> AsyncIterator[OwnNode]:
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        node = OwnNode(Places.make(root))
        await node.start()
        try:
            yield node
        finally:
            await node.parts.aclose()
            await node.version.aclose()
            await asyncio.to_thread(tidy, root)


async def test_own_driver_without_its_deferral_is_wrapped(own: OwnNode) -> None:
    volume_id, target = await own.volume(RAW), own.places.target("one")
    await own.stage(volume_id)
    assert len(own.private()) == 1
    await own.publish(volume_id, target)
    assert own.device(target).startswith("/dev/loop")
    await own.take_down(volume_id, target)
    await own.check_gone(volume_id)


async def test_volume_that_was_wrapped_stays_so_until_its_end_under_a_driver_that_defers(
    own: OwnNode,
) -> None:
    """KEP-2857, story 4: later volumes are the newer driver's own."""
    volume_id, target = await own.volume(RAW), own.places.target("one")
    await own.stage(volume_id)
    await own.publish(volume_id, target)
    await own.run_version(defers=True)
    await own.publish(volume_id, target)
    await own.take_down(volume_id, target)
    await own.check_gone(volume_id)
    volume_id = await own.volume(MOUNT)
    await own.stage(volume_id)
    assert own.private() == []
    await own.publish(volume_id, target)
    await own.take_down(volume_id, target)
    await own.check_gone(volume_id)


async def test_volume_that_a_newer_driver_deferred_is_unpublished_under_an_older_one(
    own: OwnNode,
) -> None:
    """KEP-2857, story 5."""
    await own.run_version(defers=True)
    volume_id, target = await own.volume(MOUNT), own.places.target("one")
    await own.stage(volume_id)
    await own.publish(volume_id, target)
    await own.run_version(defers=False)
    await own.take_down(volume_id, target)
    await own.check_gone(volume_id)
