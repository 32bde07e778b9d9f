"""crust's own driver, wrapped: its native deferral switched off, or on and off by an upgrade and a downgrade."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
import pytest

from crust.csi_shim.wrap.node_shim import Wrapping
from tests.integration.chain.conftest import Chain
from tests.integration.wrap.conftest import DEFERRED
from tests.support.co import MODE, capability
from tests.support.drivers import without_deferral
from tests.support.faults.refusals import refused
from tests.support.nodes.served_node import new_places, started

pytestmark = pytest.mark.root
Code = grpc.StatusCode
NEVER = {"crust.dev/defer": "never"}


@dataclass
class OwnNode(Chain):
    """A node with our driver, of which a CO sees either version."""

    wraps: bool = True
    """Whether the shim wraps a driver that does not defer."""
    version: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def wrapping(self) -> Wrapping | None:
        return Wrapping(self.places.kubelet) if self.wraps else None

    async def start_driver(self, socket: str = "") -> None:
        await super().start_driver(f"{self.places.root}/newer.sock")
        await self.run_version(defers=False)

    async def run_version(self, *, defers: bool) -> None:
        """The driver is replaced by another version."""
        await self.version.aclose()
        self.version = AsyncExitStack()
        newer = f"{self.places.root}/newer.sock"
        if os.path.lexists(self.places.driver):
            os.unlink(self.places.driver)
        serving = without_deferral.serving(newer, self.places.driver, defers=defers)
        await self.version.enter_async_context(serving)

    async def stop(self) -> None:
        await super().stop()
        await self.version.aclose()

    async def staged_volume(self, context: dict[str, str], *, raw: bool = False) -> tuple[str, str]:
        """A new volume, staged, and a target for it."""
        wanted = capability(block=raw, mode=MODE.SINGLE_NODE_MULTI_WRITER)
        volume_id = (await self.co.create("pvc-1", wanted)).volume_id
        self.created[volume_id] = None
        await self.stage(volume_id, volume_context=context)
        return volume_id, self.places.target("one")

    async def publish_as(self, volume_id: str, target: str, context: dict[str, str]) -> None:
        await self.publish(volume_id, target, defer=False, context=context)

    def private(self) -> list[str]:
        above = f"{self.places.kubelet}/plugins/kubernetes.io/csi/volumeDevices/staging"
        return os.listdir(above) if os.path.isdir(above) else []

    def check_clean(self) -> None:
        super().check_clean()
        assert self.private() == []


@pytest.fixture
async def own(request: pytest.FixtureRequest) -> AsyncIterator[OwnNode]:
    """With `no_wrap` a driver that does not defer cannot be deferred at all, as in KEP-2857."""
    with new_places() as places:
        async with started(OwnNode(places, wraps=getattr(request, "param", True))) as node:
            yield node


no_wrap = pytest.mark.parametrize("own", [False], indirect=True, ids=["no wrap"])


async def test_own_driver_without_its_deferral_is_wrapped(own: OwnNode) -> None:
    volume_id, target = await own.staged_volume(DEFERRED, raw=True)
    assert len(own.private()) == 1
    await own.publish_as(volume_id, target, DEFERRED)
    assert own.record(target).device.startswith("/dev/loop")


@pytest.mark.story(4)
async def test_wrapped_volume_stays_so_under_a_deferring_driver(own: OwnNode) -> None:
    """KEP-2857, story 4: later volumes are the newer driver's own."""
    volume_id, target = await own.staged_volume(DEFERRED, raw=True)
    await own.publish_as(volume_id, target, DEFERRED)
    await own.run_version(defers=True)
    await own.publish_as(volume_id, target, DEFERRED)
    await own.take_down()
    volume_id, target = await own.staged_volume(DEFERRED)
    assert own.private() == []
    await own.publish_as(volume_id, target, DEFERRED)


@pytest.mark.story(5)
async def test_newer_drivers_volume_is_unpublished_under_an_older_one(own: OwnNode) -> None:
    """KEP-2857, story 5: the unpublish succeeds, and the record goes with it.

    Statistics are the guest's, whatever the driver's version: here an error, because no guest has the volume.
    """
    await own.run_version(defers=True)
    volume_id, target = await own.staged_volume(DEFERRED)
    await own.publish_as(volume_id, target, DEFERRED)
    await own.run_version(defers=False)
    await refused(own.co.stats(volume_id, target), Code.FAILED_PRECONDITION)


@pytest.mark.story(2)
async def test_undeferred_volume_is_mounted_by_a_deferring_driver(own: OwnNode) -> None:
    """KEP-2857, story 2: the runtime lacks something that the pod needs, so its StorageClass says never."""
    await own.run_version(defers=True)
    volume_id, target = await own.staged_volume(NEVER)
    await own.publish_as(volume_id, target, NEVER)
    assert os.path.ismount(target)
    assert own.places.entries() == []


@pytest.mark.story(3)
@no_wrap
async def test_volume_of_a_driver_that_cannot_defer_is_mounted_on_the_host(own: OwnNode) -> None:
    """KEP-2857, story 3. One whose class says always is refused: nothing falls back in silence."""
    volume_id, target = await own.staged_volume({})
    await refused(
        own.publish_as(volume_id, target, DEFERRED), Code.UNIMPLEMENTED, "DeferralUnsupported"
    )
    await own.publish_as(volume_id, target, {})
    assert os.path.ismount(target)
    assert own.places.entries() == []


@pytest.mark.story(6)
@no_wrap
async def test_publish_under_an_older_driver_fails_until_the_newer_returns(own: OwnNode) -> None:
    """KEP-2857, story 6: the driver is downgraded between stage and publish."""
    await own.run_version(defers=True)
    volume_id, target = await own.staged_volume(DEFERRED)
    await own.run_version(defers=False)
    for _ in range(2):
        await refused(
            own.publish_as(volume_id, target, DEFERRED), Code.UNIMPLEMENTED, "DeferralUnsupported"
        )
        assert own.places.entries() == []
        assert not os.path.ismount(target)
    await own.run_version(defers=True)
    await own.publish_as(volume_id, target, DEFERRED)
    assert own.record(target).device.startswith("/dev/loop")
