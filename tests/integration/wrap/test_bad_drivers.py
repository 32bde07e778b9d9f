"""A driver that does something else than it answers: a typed error that names it, and nothing is left."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from crust.host.block import loop
from crust.host.mounts import mount_api
from crust.wire.csi.v1 import csi_pb2
from tests.integration.wrap.conftest import MIB, MODE, NAMES, TIMEOUT_S, Volume, Wrapped, capability
from tests.support.refusals import refused, refused_in_time

pytestmark = pytest.mark.root
Code = grpc.StatusCode


async def staged(node: Wrapped, name: str = "pvc-1") -> tuple[Volume, str]:
    """A deferred volume, staged, and a target for it."""
    volume = await node.volume(name)
    await node.stage(volume)
    return volume, node.target("one")


@pytest.mark.spec("D-42")
@pytest.mark.parametrize("badly", ["directory", "no device"])
async def test_driver_that_publishes_no_device_is_named_and_undone(
    node: Wrapped, badly: str
) -> None:
    volume, target = await staged(node)
    node.driver.misbehave(NodePublishVolume=badly)
    name = NAMES[node.driver.kind]
    for _ in range(2):
        await refused(
            node.publish(volume, target), Code.INTERNAL, "NotPublishedAsBlock", name, "undone"
        )
        node.check_unpublished(volume, target)
        assert not os.path.lexists(node.paths(volume).staging)
    node.driver.misbehave()
    await node.publish(volume, target)
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_driver_that_publishes_nothing_is_undone(cloud_node: Wrapped) -> None:
    volume, target = await staged(cloud_node)
    cloud_node.driver.misbehave(NodePublishVolume="nothing")
    await refused(cloud_node.publish(volume, target), Code.INTERNAL, "published nothing")
    cloud_node.check_unpublished(volume, target)
    await cloud_node.unstage(volume)
    await cloud_node.check_gone(volume, target)


@pytest.fixture
def spare(image_root: Path) -> Iterator[str]:
    """A device of somebody else."""
    image = image_root / "spare.img"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    device = loop.attach(str(image))
    yield device.path
    loop.detach(device)


async def test_other_device_for_a_volume_that_a_sandbox_has_is_refused(
    cloud_node: Wrapped, spare: str
) -> None:
    """The bind at the leaf is lost, and the driver publishes another device in its place."""
    node = cloud_node
    volume, target = await staged(node)
    await node.publish(volume, target)
    leaf = node.paths(volume).leaf(target)
    await asyncio.to_thread(mount_api.unmount, leaf)
    node.driver.misbehave(NodePublishVolume=f"device {spare}")
    with node.sandbox(target) as device:
        await refused(node.publish(volume, target), Code.UNAVAILABLE, "HeldBySandbox", "box-1")
        entry = node.entry(target)
        assert entry is not None
        assert entry.require().device == device != spare
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_publish_that_hangs_is_joined_by_its_retry(node: Wrapped) -> None:
    volume, target = await staged(node)
    node.driver.misbehave(NodePublishVolume="hang")
    first = refused_in_time(
        lambda: node.publish(volume, target, timeout_s=3),
        Code.ABORTED,
        "OperationOverdue",
        "NodePublishVolume",
    )
    await asyncio.gather(first, asyncio.to_thread(node.driver.wait_hanging))
    second = asyncio.create_task(node.publish(volume, target))
    await refused(node.unpublish(volume, target), Code.ABORTED, "NodePublishVolume")
    node.driver.release()
    await second
    assert len(node.driver.calls("NodePublishVolume")) == 1
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


@pytest.mark.parametrize("when", ["die before", "die after"])
@pytest.mark.parametrize(
    "method",
    ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"],
)
async def test_driver_that_dies_in_the_middle_is_called_again(
    cloud_node: Wrapped, method: str, when: str
) -> None:
    node = cloud_node
    volume, target = await node.volume(), node.target("one")
    for name, step in node.life(volume, target).items():
        if name == method:
            node.driver.misbehave(**{method: when})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await step()
            assert caught.value.code() is Code.UNAVAILABLE
            await asyncio.to_thread(node.driver.wait)
            node.driver.misbehave()
            await asyncio.to_thread(node.driver.start)
        await step()
    await node.check_gone(volume, target)


@pytest.mark.parametrize("method", ["NodeStageVolume", "NodePublishVolume"])
async def test_status_of_the_driver_passes_unchanged_and_nothing_is_left(
    cloud_node: Wrapped, method: str
) -> None:
    node = cloud_node
    volume, target = await node.volume(), node.target("one")
    node.driver.misbehave(**{method: "fail INTERNAL rpc error: disk is on fire"})
    if method == "NodePublishVolume":
        await node.stage(volume)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.life(volume, target)[method]()
    assert caught.value.code() is Code.INTERNAL
    assert caught.value.details() == "rpc error: disk is on fire"
    node.check_unpublished(volume, target)
    assert os.path.lexists(node.paths(volume).staging) == (method == "NodePublishVolume")
    node.driver.misbehave()
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_final_status_after_which_something_is_mounted_is_undone(cloud_node: Wrapped) -> None:
    node = cloud_node
    volume, target = await staged(node)
    node.driver.misbehave(NodePublishVolume="fail-after INTERNAL late trouble")
    await refused(node.publish(volume, target), Code.INTERNAL, "late trouble")
    node.check_unpublished(volume, target)
    node.driver.misbehave()
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_second_bind_at_the_leaf_is_taken_off_too(node: Wrapped) -> None:
    """A publish that was tried by a shim of before, or by hand."""
    volume, target = await staged(node)
    await node.publish(volume, target)
    leaf = node.paths(volume).leaf(target)
    for _ in range(2):
        await asyncio.to_thread(mount_api.bind, node.driver.attached()[0], leaf)
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_statistics_of_a_deferred_volume_never_come_from_the_driver(node: Wrapped) -> None:
    volume, target = await staged(node)
    node.driver.misbehave(NodeGetVolumeStats="devtmpfs")
    await node.publish(volume, target)
    request = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume.volume_id, volume_path=target)
    await refused(
        node.node.NodeGetVolumeStats(request, timeout=TIMEOUT_S), Code.FAILED_PRECONDITION
    )
    assert node.driver.calls("NodeGetVolumeStats") == []
    await node.unpublish(volume, target)
    await node.unstage(volume)


@pytest.mark.spec("D-41")
async def test_access_mode_that_the_driver_refuses_for_mounts_does_not_become_block(
    cloud_node: Wrapped,
) -> None:
    node = cloud_node
    made = await node.volume()
    many = capability(mode=MODE.MULTI_NODE_MULTI_WRITER)
    volume = Volume(made.volume_id, made.context, made.publish_context, many)
    await refused(
        node.stage(volume), Code.INVALID_ARGUMENT, "CannotBeDeferred", "MULTI_NODE_MULTI_WRITER"
    )
    undecided = {"crust.dev/defer": "runtime-class"}
    volume = Volume(made.volume_id, undecided, made.publish_context, many)
    await refused(node.stage(volume), Code.INVALID_ARGUMENT, "Volume capability is not supported")
    (passed,) = node.driver.calls("NodeStageVolume")
    assert passed == node.stage_request(volume)
    await node.delete(made)
