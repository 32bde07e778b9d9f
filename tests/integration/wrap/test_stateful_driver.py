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


async def published(node: Wrapped) -> tuple[Volume, str]:
    volume, target = await node.volume(), node.target("one")
    await node.stage(volume)
    await node.publish(volume, target)
    return volume, target


async def taken_down(node: Wrapped, volume: Volume, target: str) -> None:
    """What a kubelet calls at the end; a driver that has anything left in its account deletes nothing."""
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_file_in_place_of_a_staged_device_is_refused_until_the_co_stages_again(
    stateful_node: Wrapped,
) -> None:
    """The mount of the stage is gone, and the driver answers OK to the stage and to the publish."""
    node = stateful_node
    volume, target = await node.volume(), node.target("one")
    await node.stage(volume)
    staged = f"{node.paths(volume).staging}/{volume.volume_id}"
    await asyncio.to_thread(mount_api.unmount, staged)
    node.driver.misbehave(NodeStageVolume="believe the account")
    await node.stage(volume)
    await refused(node.publish(volume, target), Code.INTERNAL, "NotPublishedAsBlock", "a file")
    node.check_unpublished(volume, target)
    assert node.driver.calls("NodeUnstageVolume") == []  # this publish did not stage it
    await node.unstage(volume)
    await node.stage(volume)
    await node.publish(volume, target)
    entry = node.entry(target)
    assert entry is not None
    assert [entry.require().device] == node.driver.attached()
    await taken_down(node, volume, target)


async def test_volume_that_was_created_as_mount_is_refused_in_the_drivers_words(
    stateful_node: Wrapped,
) -> None:
    """Its class said so without a shim at the controller, or after it was created."""
    node = stateful_node
    made = await node.volume(context={}, mkfs=False)
    volume = replace(made, context=DEFERRED)
    target = node.target("one")
    await node.stage(volume)
    words = "cannot publish a mount volume as block volume"
    await refused(node.publish(volume, target), Code.INVALID_ARGUMENT, words)
    node.check_unpublished(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_inline_volume_is_refused_before_the_driver_makes_it(stateful_node: Wrapped) -> None:
    """A kubelet does not unpublish what it treats as never published: what was made would stay."""
    node = stateful_node
    made = await node.volume()
    inline = Volume("csi-0123", {**made.context, INLINE: "true"}, {}, made.capability)
    target = node.target("one")
    calls = node.driver.names()
    await refused(
        node.publish(inline, target), Code.INVALID_ARGUMENT, "CannotBeDeferred", "inline", "never"
    )
    assert node.driver.names() == calls
    node.check_unpublished(inline, target)
    on_host = replace(inline, context={INLINE: "true", "crust.dev/defer": "never"})
    await node.publish(on_host, target)
    assert mountinfo.stacked_at(target)
    await node.unpublish(on_host, target)
    await node.delete(made)


async def test_device_grows_where_the_node_answers_no_size(stateful_node: Wrapped) -> None:
    node = stateful_node
    volume, target = await node.volume(), node.target("one")
    await node.stage(volume)
    await node.expand(volume, node.staging(volume), 80 * MIB)
    await node.publish(volume, target)
    assert await node.expand(volume, target, 96 * MIB) == 96 * MIB
    entry = node.entry(target)
    assert entry is not None
    assert devices.size_bytes(entry.require().device) == 96 * MIB
    await taken_down(node, volume, target)


async def test_staged_volume_grows_after_a_restart_of_the_shim_once_it_is_staged_again(
    stateful_node: Wrapped,
) -> None:
    node = stateful_node
    volume, target = await node.volume(), node.target("one")
    await node.stage(volume)
    await node.restart_shim()
    expand = node.expand(volume, node.staging(volume), 80 * MIB)
    await refused(
        expand, Code.UNAVAILABLE, "NotStagedSinceRestart", "is not what a block volume is"
    )
    await node.stage(volume)
    await node.expand(volume, node.staging(volume), 80 * MIB)
    await node.publish(volume, target)
    entry = node.entry(target)
    assert entry is not None
    assert devices.size_bytes(entry.require().device) == 80 * MIB
    await taken_down(node, volume, target)


async def test_driver_that_dies_while_a_staged_volume_grows_leaves_what_an_unstage_clears(
    stateful_node: Wrapped,
) -> None:
    node = stateful_node
    volume, target = await node.volume(), node.target("one")
    await node.stage(volume)
    node.driver.misbehave(NodeExpandVolume="die after")
    await refused(node.expand(volume, node.staging(volume), 96 * MIB), Code.UNAVAILABLE)
    await asyncio.to_thread(node.driver.wait)
    node.driver.misbehave()
    await asyncio.to_thread(node.driver.start)
    await node.unstage(volume)
    await node.check_gone(volume, target)


@pytest.mark.parametrize("restarts", [False, True], ids=["shim goes on", "shim is restarted"])
async def test_volume_is_taken_down_under_a_version_of_the_driver_with_another_name(
    stateful_node: Wrapped,
    restarts: bool,  # noqa: FBT001 - pytest's
) -> None:
    """The private paths depend on the name; a driver that is asked about others answers OK, and keeps the device."""
    node = stateful_node
    volume, target = await published(node)
    await asyncio.to_thread(node.driver.kill)
    node.driver.misbehave(name="renamed.csi.example.org")
    await asyncio.to_thread(node.driver.start)
    if restarts:
        node.driver_name = NAMES[node.driver.kind]
        await node.restart_shim()
    await taken_down(node, volume, target)
