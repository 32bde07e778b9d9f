"""A driver that believes its own account, and publishes whatever lies where it staged."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from crust.host.block import devices
from crust.host.mounts import mount_api, mountinfo
from tests.integration.wrap.conftest import DEFERRED, Volume, Wrapped
from tests.support.co import MIB
from tests.support.drivers.vendor_driver import NAMES
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.root
Code = grpc.StatusCode
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
    await stateful.restart_shim()
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
async def test_volume_is_taken_down_under_a_version_of_the_driver_with_another_name(
    stateful: Wrapped,
    restarts: bool,  # noqa: FBT001 - pytest's
) -> None:
    """The private paths depend on the name; a driver that is asked about others answers OK, and keeps the device."""
    await stateful.published_volume()
    await asyncio.to_thread(stateful.driver.kill)
    stateful.driver.misbehave(name="renamed.csi.example.org")
    await asyncio.to_thread(stateful.driver.start)
    if restarts:
        stateful.known_as = NAMES[stateful.driver.kind]
        await stateful.restart_shim()
