"""crust's own driver, wrapped: its native deferral switched off, or on and off by an upgrade and a downgrade."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from crust.csi_shim.wrap.node_shim import Wrapping
from crust.host.block import devices
from crust.host.mounts import mount_api, mountinfo
from tests.integration.wrap.conftest import DEFERRED, Volume, Wrapped
from tests.support.co import MIB, MODE, capability
from tests.support.drivers import without_deferral
from tests.support.drivers.vendor_driver import NAMES
from tests.support.faults.refusals import refused
from tests.support.nodes.node import PARTS
from tests.support.nodes.places import Places
from tests.support.nodes.served_node import BlockNode, started

pytestmark = pytest.mark.root
Code = grpc.StatusCode
NEVER = {"crust.dev/defer": "never"}


@dataclass
class OwnNode(BlockNode):
    """A node with our driver, of which a CO sees either version."""

    parts: tuple[str, ...] = field(default=("newer", *PARTS), kw_only=True)

    def part(self, name: str) -> AbstractAsyncContextManager[Any]:
        if name == "newer":
            return self.driver(f"{self.places.root}/newer.sock")
        return self.version(defers=False) if name == "driver" else super().part(name)

    def version(self, *, defers: bool) -> AbstractAsyncContextManager[None]:
        """The driver as a version of it."""
        newer = f"{self.places.root}/newer.sock"
        return without_deferral.serving(newer, self.places.driver, defers=defers)

    async def run_version(self, *, defers: bool) -> None:
        """The driver is replaced by another version."""
        await self.enter("driver", self.version(defers=defers))

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
async def own(request: pytest.FixtureRequest, places: Places) -> AsyncIterator[OwnNode]:
    """With `no_wrap` a driver that does not defer cannot be deferred at all, as in KEP-2857."""
    wrapping = Wrapping(places.kubelet) if getattr(request, "param", True) else None
    async with started(OwnNode(places, wrapping=wrapping)) as node:
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
async def test_volume_of_driver_that_cannot_defer_is_mounted_on_host(own: OwnNode) -> None:
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


INLINE = "csi.storage.k8s.io/ephemeral"


async def test_file_in_place_of_a_staged_device_is_refused(stateful: Wrapped) -> None:
    """The mount of the stage is gone, and the driver answers OK to the stage and to the publish."""
    volume, target = await stateful.staged_volume()
    staged = f"{stateful.paths(volume).staging}/{volume.volume_id}"
    await asyncio.to_thread(mount_api.unmount, staged)
    stateful.driver.misbehave(NodeStageVolume="believe the account")
    await stateful.stage(volume)
    await refused(stateful.publish(volume, target), Code.INTERNAL, "NotPublishedAsBlock", "a file")
    stateful.check_unpublished(volume, target)
    assert stateful.driver.calls("NodeUnstageVolume") == []  # this publish did not stage it
    await stateful.unstage(volume)
    await stateful.stage(volume)
    await stateful.publish(volume, target)
    assert [stateful.record(target).device] == stateful.driver.attached()


async def test_volume_created_as_mount_is_refused_in_the_drivers_words(stateful: Wrapped) -> None:
    """Its class said so without a shim at the controller, or after it was created."""
    made = await stateful.volume(context={}, mkfs=False)
    volume = replace(made, context=DEFERRED)
    target = stateful.target("one")
    await stateful.stage(volume)
    words = "cannot publish a mount volume as block volume"
    await refused(stateful.publish(volume, target), Code.INVALID_ARGUMENT, words)
    stateful.check_unpublished(volume, target)


async def test_inline_volume_is_refused_before_the_driver_makes_it(stateful: Wrapped) -> None:
    """A kubelet does not unpublish what it treats as never published: what was made would stay."""
    made = await stateful.volume()
    inline = Volume("csi-0123", {**made.context, INLINE: "true"}, {}, made.capability)
    target = stateful.target("one")
    calls = stateful.driver.names()
    await refused(
        stateful.publish(inline, target),
        Code.INVALID_ARGUMENT,
        "CannotBeDeferred",
        "inline",
        "never",
    )
    assert stateful.driver.names() == calls
    stateful.check_unpublished(inline, target)
    on_host = replace(inline, context={INLINE: "true", "crust.dev/defer": "never"})
    await stateful.publish(on_host, target)
    assert mountinfo.stacked_at(target)


async def test_device_grows_where_the_node_answers_no_size(stateful: Wrapped) -> None:
    volume, target = await stateful.staged_volume()
    await stateful.expand(volume, stateful.staging(volume), 80 * MIB)
    await stateful.publish(volume, target)
    assert await stateful.expand(volume, target, 96 * MIB) == 96 * MIB
    assert devices.size_bytes(stateful.record(target).device) == 96 * MIB


async def test_staged_volume_grows_after_a_restart_and_another_stage(stateful: Wrapped) -> None:
    volume, target = await stateful.staged_volume()
    await stateful.restart("shim")
    expand = stateful.expand(volume, stateful.staging(volume), 80 * MIB)
    await refused(
        expand, Code.UNAVAILABLE, "NotStagedSinceRestart", "is not what a block volume is"
    )
    await stateful.stage(volume)
    await stateful.expand(volume, stateful.staging(volume), 80 * MIB)
    await stateful.publish(volume, target)
    assert devices.size_bytes(stateful.record(target).device) == 80 * MIB


async def test_driver_that_dies_while_growing_is_cleaned_up(stateful: Wrapped) -> None:
    volume, _ = await stateful.staged_volume()
    stateful.driver.misbehave(NodeExpandVolume="die after")
    await refused(stateful.expand(volume, stateful.staging(volume), 96 * MIB), Code.UNAVAILABLE)
    await stateful.restart_driver()


@pytest.mark.parametrize("restarts", [False, True], ids=["shim goes on", "shim is restarted"])
async def test_volume_is_taken_down_by_renamed_driver(
    stateful: Wrapped,
    restarts: bool,  # noqa: FBT001 - pytest's
) -> None:
    """The private paths depend on the name; a driver that is asked about others answers OK, and keeps the device."""
    await stateful.published_volume()
    await asyncio.to_thread(stateful.driver.kill)
    stateful.driver.misbehave(name="renamed.csi.example.org")
    await asyncio.to_thread(stateful.driver.start)
    if restarts:
        stateful.wrapping = replace(stateful.wrapping, driver_name=NAMES[stateful.driver.kind])
        await stateful.restart("shim")
