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

from crust.blockdriver import app as driver_app
from crust.blockdriver import serve
from crust.core import volumes
from crust.csi_shim.wrap.frontend import Wrapping
from crust.handoff import store
from crust.host.block import devices
from crust.host.mounts import mountinfo
from crust.proxy import app as proxy_app
from crust.proxy import guard
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.integration.wrap.conftest import DEFERRED, tidy
from tests.support.co import Co, capability
from tests.support.drivers import without_deferral
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Places
from tests.support.runtimes.fake_handler import FakeHandler, running

pytestmark = pytest.mark.root
Code = grpc.StatusCode
DRIVER = "block.csi.crust.dev"
RAW = capability(block=True)
MOUNT = capability()


@dataclass
class OwnNode:
    """Proxy, shim and our driver, of which a CO sees either version."""

    places: Places
    wraps: bool = True
    """Whether the shim wraps a driver that does not defer."""
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
        guarded = guard.GuardedTargets([self.places.kubelet])
        await enter(proxy_app.running(settings, targets=guarded, devices=devices))
        wrapping = Wrapping(self.places.kubelet) if self.wraps else None
        await enter(nodes.shim(self.places, wrapping=wrapping))
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
        serving = without_deferral.serving(newer, self.places.driver, defers=defers)
        await self.version.enter_async_context(serving)

    @property
    def node(self) -> "csi_pb2_grpc.NodeAsyncStub":
        return csi_pb2_grpc.NodeStub(self.co)

    async def volume(self, of: csi_pb2.VolumeCapability) -> str:
        return (await Co(self.co).create("pvc-1", of)).volume_id

    def staging(self) -> str:
        path = f"{self.places.kubelet}/plugins/kubernetes.io/csi/own/1/globalmount"
        os.makedirs(path, exist_ok=True)
        return path

    async def stage(self, volume_id: str, context: dict[str, str] = DEFERRED) -> None:
        await Co(self.co).stage(volume_id, self.staging(), MOUNT, volume_context=context)

    async def publish(
        self, volume_id: str, target: str, context: dict[str, str] = DEFERRED
    ) -> None:
        staging = self.staging()
        await Co(self.co).publish(
            volume_id, target, MOUNT, defer=False, staging=staging, volume_context=context
        )

    async def take_down(self, volume_id: str, target: str) -> None:
        await Co(self.co).unpublish(volume_id, target)
        await Co(self.co).unstage(volume_id, self.staging())

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
        await Co(self.co).delete(volume_id)


@pytest.fixture
async def own(request: pytest.FixtureRequest) -> AsyncIterator[OwnNode]:
    """With `no_wrap` a driver that does not defer cannot be deferred at all, as in KEP-2857."""
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        node = OwnNode(Places.make(root), wraps=getattr(request, "param", True))
        await node.start()
        try:
            yield node
        finally:
            await node.parts.aclose()
            await node.version.aclose()
            await asyncio.to_thread(tidy, root)


no_wrap = pytest.mark.parametrize("own", [False], indirect=True, ids=["no wrap"])


async def test_own_driver_without_its_deferral_is_wrapped(own: OwnNode) -> None:
    volume_id, target = await own.volume(RAW), own.places.target("one")
    await own.stage(volume_id)
    assert len(own.private()) == 1
    await own.publish(volume_id, target)
    assert own.device(target).startswith("/dev/loop")
    await own.take_down(volume_id, target)
    await own.check_gone(volume_id)


@pytest.mark.story(4)
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


@pytest.mark.story(5)
async def test_volume_that_a_newer_driver_deferred_is_unpublished_under_an_older_one(
    own: OwnNode,
) -> None:
    """KEP-2857, story 5: the unpublish succeeds, and the record goes with it.

    Statistics are the guest's, whatever the driver's version: here an error, because no guest has the volume.
    """
    await own.run_version(defers=True)
    volume_id, target = await own.volume(MOUNT), own.places.target("one")
    await own.stage(volume_id)
    await own.publish(volume_id, target)
    await own.run_version(defers=False)
    stats = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume_id, volume_path=target)
    await refused(own.node.NodeGetVolumeStats(stats, timeout=30), Code.FAILED_PRECONDITION)
    await own.take_down(volume_id, target)
    await own.check_gone(volume_id)


@pytest.mark.story(2)
async def test_volume_that_its_class_does_not_defer_is_mounted_on_the_host_by_a_driver_that_can_defer(
    own: OwnNode,
) -> None:
    """KEP-2857, story 2: the runtime lacks something that the pod needs, so its StorageClass says never."""
    await own.run_version(defers=True)
    volume_id, target = await own.volume(MOUNT), own.places.target("one")
    never = {"crust.dev/defer": "never"}
    await own.stage(volume_id, never)
    await own.publish(volume_id, target, never)
    assert os.path.ismount(target)
    assert own.places.entries() == []
    await own.take_down(volume_id, target)
    await own.check_gone(volume_id)


@pytest.mark.story(3)
@no_wrap
async def test_volume_of_a_driver_that_cannot_defer_is_mounted_on_the_host(own: OwnNode) -> None:
    """KEP-2857, story 3. One whose class says always is refused: nothing falls back in silence."""
    volume_id, target = await own.volume(MOUNT), own.places.target("one")
    await own.stage(volume_id, {})
    await refused(own.publish(volume_id, target), Code.UNIMPLEMENTED, "DeferralUnsupported")
    await own.publish(volume_id, target, {})
    assert os.path.ismount(target)
    assert own.places.entries() == []
    await own.take_down(volume_id, target)
    await own.check_gone(volume_id)


@pytest.mark.story(6)
@no_wrap
async def test_publish_fails_under_an_older_driver_until_the_newer_one_is_back(
    own: OwnNode,
) -> None:
    """KEP-2857, story 6: the driver is downgraded between stage and publish."""
    await own.run_version(defers=True)
    volume_id, target = await own.volume(MOUNT), own.places.target("one")
    await own.stage(volume_id)
    await own.run_version(defers=False)
    for _ in range(2):
        await refused(own.publish(volume_id, target), Code.UNIMPLEMENTED, "DeferralUnsupported")
        assert own.places.entries() == []
        assert not os.path.ismount(target)
    await own.run_version(defers=True)
    await own.publish(volume_id, target)
    assert own.device(target).startswith("/dev/loop")
    await own.take_down(volume_id, target)
    await own.check_gone(volume_id)
