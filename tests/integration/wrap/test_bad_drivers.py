"""A driver that does something else than it answers: a typed error that names it, and nothing is left."""

import asyncio
import os
from pathlib import Path

import grpc
import grpc.aio
import pytest

from crust.host.block import devices
from crust.host.mounts import mount_api
from crust.wire.csi.v1 import csi_pb2
from examples.drivers import disks
from tests.integration.conftest import MakeDevice
from tests.integration.wrap.conftest import TIMEOUT_S, Volume, Wrapped, node_with
from tests.support.co import MODE, capability
from tests.support.drivers.vendor_driver import NAMES
from tests.support.faults.refusals import refused, repeated

pytestmark = pytest.mark.root
Code = grpc.StatusCode
METHODS = ("NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume")


@pytest.mark.spec("D-42")
@pytest.mark.parametrize("badly", ["directory", "no device"])
async def test_driver_without_a_device_is_undone(node: Wrapped, badly: str) -> None:
    volume, target = await node.staged_volume()
    node.driver.misbehave(NodePublishVolume=badly)
    name = NAMES[node.driver.kind]
    for _ in range(2):
        await refused(
            node.publish(volume, target), Code.INTERNAL, "NotPublishedAsBlock", name, "undone"
        )
        node.check_unpublished(volume, target)
        assert os.path.lexists(node.paths(volume).staging) == node.stages  # not of the publish
    node.driver.misbehave()
    await node.publish(volume, target)


async def test_driver_that_publishes_nothing_is_undone(cloud: Wrapped) -> None:
    volume, target = await cloud.staged_volume()
    cloud.driver.misbehave(NodePublishVolume="nothing")
    await refused(cloud.publish(volume, target), Code.INTERNAL, "published nothing")
    cloud.check_unpublished(volume, target)


async def test_what_a_hostile_driver_publishes_is_refused_and_undone(
    device: MakeDevice, tmp_path: Path
) -> None:
    """No link is followed, no byte of a disk is written, and no two volumes have one device."""
    spare, mounted, elsewhere = device().path, device().path, tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("of the host")
    await asyncio.to_thread(disks.run, "mkfs.ext4", "-q", mounted)
    before = {path: Path(path).read_bytes() for path in (spare, mounted)}
    number, root = os.stat(spare).st_rdev, os.stat("/").st_dev
    own = f"block {os.major(number)} {os.minor(number)}"
    async with node_with("hostile") as node:
        first, target = await node.volume("first", mkfs=False), node.target("first")
        node.driver.misbehave(NodePublishVolume=own)
        await node.publish(first, target)
        assert devices.identify(node.record(target).device) == devices.identify(spare)
        volume, other = await node.volume(mkfs=False), node.target("other")
        for published in (
            *(own, f"bind {spare}"),  # the device of another volume
            *(f"link {mounted}", f"link {elsewhere}/file", f"bind {elsewhere}/file"),
            *("bind /dev/zero", "char 1 1", "fifo", "socket", "directory", "nothing"),
            *("block 8 4095", f"block {os.major(root)} {os.minor(root)}", "error"),
            f"parent {elsewhere}",
        ):
            node.driver.misbehave(NodePublishVolume=published)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await node.publish(volume, other)
            assert len(caught.value.details() or "") <= 1 << 16
            assert node.entry(other) is None
            leaves = Path(node.paths(volume).published)
            assert leaves.is_symlink() == published.startswith("parent"), published
        leaves.unlink()
        leaves.with_name(f"{leaves.name}.moved").rmdir()
    assert {path: Path(path).read_bytes() for path in before} == before
    assert [path.name for path in elsewhere.iterdir()] == ["file"]


async def test_other_device_under_a_sandbox_is_refused(cloud: Wrapped, device: MakeDevice) -> None:
    """The bind at the leaf is lost, and the driver publishes another device in its place."""
    volume, target = await cloud.published_volume()
    spare = device().path
    leaf = cloud.paths(volume).leaf(target)
    await asyncio.to_thread(mount_api.unmount, leaf)
    cloud.driver.misbehave(NodePublishVolume=f"device {spare}")
    with cloud.sandbox(target) as held:
        await refused(cloud.publish(volume, target), Code.UNAVAILABLE, "HeldBySandbox", "box-1")
        assert cloud.record(target).device == held != spare


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("cloud", method) for method in METHODS),
        *(("minimal", method) for method in METHODS if "stage" not in method.lower()),
    ],
)
async def test_call_that_hangs_is_not_repeated(kind: str, method: str) -> None:
    """Another volume lives its life meanwhile."""
    async with node_with(kind) as node:
        volume, target = await node.volume(), node.target("one")
        other, beside = await node.volume("pvc-2"), node.target("two")
        for name, step in node.life(volume, target).items():
            if name != method:
                await step()
                continue
            node.driver.misbehave(**{method: f"hang on {volume.volume_id}"})
            given_up = asyncio.ensure_future(step())
            await asyncio.to_thread(node.driver.wait_hanging)
            given_up.cancel()
            await asyncio.wait([given_up])
            # its operation may end as the retry comes
            retry = asyncio.ensure_future(repeated(step, Code.ABORTED))
            for step_of_other in node.life(other, beside).values():
                await step_of_other()
            calls = [
                call for call in node.driver.calls(method) if call.volume_id == volume.volume_id
            ]
            assert len(calls) == 1
            assert not retry.done()
            node.driver.release()
            await retry


async def test_unpublish_while_the_publish_hangs_is_aborted(node: Wrapped) -> None:
    volume, target = await node.staged_volume()
    node.driver.misbehave(NodePublishVolume="hang")
    first = asyncio.create_task(node.publish(volume, target))
    await asyncio.to_thread(node.driver.wait_hanging)
    await refused(node.unpublish(volume, target), Code.ABORTED, "NodePublishVolume")
    node.driver.release()
    await first


@pytest.mark.parametrize("when", ["die before", "die after"])
@pytest.mark.parametrize("method", METHODS)
async def test_driver_that_dies_in_the_middle_is_called_again(
    cloud: Wrapped, method: str, when: str
) -> None:
    volume, target = await cloud.volume(), cloud.target("one")
    for name, step in cloud.life(volume, target).items():
        if name == method:
            cloud.driver.misbehave(**{method: when})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await step()
            assert caught.value.code() is Code.UNAVAILABLE
            await cloud.restart_driver()
        await step()


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.PERMISSION_DENIED, Code.UNAUTHENTICATED])
@pytest.mark.parametrize("method", ["NodeStageVolume", "NodePublishVolume"])
async def test_status_of_the_driver_passes_unchanged_and_nothing_is_left(
    cloud: Wrapped, method: str, code: grpc.StatusCode
) -> None:
    volume, target = await cloud.volume(), cloud.target("one")
    cloud.driver.misbehave(**{method: f"fail {code.name} rpc error: disk is on fire"})
    if method == "NodePublishVolume":
        await cloud.stage(volume)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cloud.life(volume, target)[method]()
    assert caught.value.code() is code
    assert caught.value.details() == "rpc error: disk is on fire"
    cloud.check_unpublished(volume, target)
    assert os.path.lexists(cloud.paths(volume).staging) == (method == "NodePublishVolume")


async def test_final_status_of_a_repeated_stage_forgets_no_volume(cloud: Wrapped) -> None:
    """A restarted kubelet stages again; what the driver refuses then, it has all the same."""
    volume, _ = await cloud.staged_volume()
    cloud.driver.misbehave(NodeStageVolume="fail INTERNAL no route to the storage")
    await refused(cloud.stage(volume), Code.UNAVAILABLE, "no route to the storage")


@pytest.mark.parametrize("method", ["NodeUnpublishVolume", "NodeUnstageVolume"])
async def test_status_of_an_end_passes_unchanged(cloud: Wrapped, method: str) -> None:
    volume, target = await cloud.published_volume()
    if method == "NodeUnstageVolume":
        await cloud.unpublish(volume, target)
    cloud.driver.misbehave(**{method: "fail PERMISSION_DENIED the token of the node has expired"})
    for _ in range(2):
        await refused(
            cloud.life(volume, target)[method](),
            Code.PERMISSION_DENIED,
            "the token of the node has expired",
        )
    assert (cloud.entry(target) is not None) == (method == "NodeUnpublishVolume")
    assert os.path.lexists(cloud.paths(volume).staging)


@pytest.mark.parametrize("code", [Code.ABORTED, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE])
async def test_uncertain_stage_is_kept_for_unstage(cloud: Wrapped, code: grpc.StatusCode) -> None:
    """Drivers of clouds answer ABORTED while an earlier call runs; a pod that is deleted then is unstaged."""
    volume = await cloud.volume()
    cloud.driver.misbehave(NodeStageVolume=f"fail {code.name} an operation is in progress")
    await refused(cloud.stage(volume), code, "an operation is in progress")
    assert os.path.lexists(cloud.paths(volume).staging)
    cloud.driver.misbehave()
    await cloud.unstage(volume)
    (asked,) = cloud.driver.calls("NodeUnstageVolume")
    assert asked.staging_target_path == cloud.paths(volume).staging


async def test_final_status_after_which_something_is_mounted_is_undone(cloud: Wrapped) -> None:
    volume, target = await cloud.staged_volume()
    cloud.driver.misbehave(NodePublishVolume="fail-after INTERNAL late trouble")
    await refused(cloud.publish(volume, target), Code.INTERNAL, "late trouble")
    cloud.check_unpublished(volume, target)


async def test_retry_of_publish_keeps_volume_that_guest_may_have(node: Wrapped) -> None:
    """Another bind of the device arrived at the leaf, then all binds are lost while a guest writes to the device."""
    volume, target = await node.published_volume()
    leaf = node.paths(volume).leaf(target)
    with node.sandbox(target) as device:
        await asyncio.to_thread(mount_api.bind, device, leaf)
        await node.publish(volume, target)
        for _ in range(2):
            await asyncio.to_thread(mount_api.unmount, leaf)
        node.driver.misbehave(NodePublishVolume="no device")
        await refused(node.publish(volume, target), Code.UNAVAILABLE, "NotPublishedAsBlock")
        node.driver.misbehave(NodePublishVolume="fail INTERNAL out of order")
        await refused(node.publish(volume, target), Code.UNAVAILABLE, "out of order")
        assert node.driver.calls("NodeUnpublishVolume") == []
        assert node.driver.calls("NodeUnstageVolume") == []
        node.driver.misbehave()
        await node.publish(volume, target)


async def test_refused_first_stage_that_left_mount_is_unstaged_by_co(cloud: Wrapped) -> None:
    volume = await cloud.volume()
    staging = cloud.paths(volume).staging
    cloud.driver.misbehave(NodeStageVolume="hang")
    staging_call = asyncio.create_task(cloud.stage(volume))
    await asyncio.to_thread(cloud.driver.wait_hanging)
    await asyncio.to_thread(mount_api.bind, staging, staging)  # what such a driver mounts there
    cloud.driver.misbehave(NodeStageVolume="fail-after INTERNAL no route to the storage")
    cloud.driver.release()
    await refused(staging_call, Code.UNAVAILABLE, "no route to the storage")
    assert os.path.lexists(staging)
    await asyncio.to_thread(mount_api.unmount, staging)


async def test_second_bind_at_the_leaf_is_taken_off_too(node: Wrapped) -> None:
    """A publish that was tried by a shim of before, or by hand."""
    volume, target = await node.published_volume()
    leaf = node.paths(volume).leaf(target)
    for _ in range(2):
        await asyncio.to_thread(mount_api.bind, node.driver.attached()[0], leaf)


async def test_statistics_of_a_deferred_volume_never_come_from_the_driver(node: Wrapped) -> None:
    volume, target = await node.staged_volume()
    node.driver.misbehave(NodeGetVolumeStats="devtmpfs")
    await node.publish(volume, target)
    request = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume.volume_id, volume_path=target)
    await refused(
        node.node.NodeGetVolumeStats(request, timeout=TIMEOUT_S), Code.FAILED_PRECONDITION
    )
    assert node.driver.calls("NodeGetVolumeStats") == []


@pytest.mark.spec("D-41")
async def test_refused_access_mode_does_not_become_block(cloud: Wrapped) -> None:
    made = await cloud.volume()
    many = capability(mode=MODE.MULTI_NODE_MULTI_WRITER)
    volume = Volume(made.volume_id, made.context, made.publish_context, many)
    await refused(
        cloud.stage(volume), Code.INVALID_ARGUMENT, "CannotBeDeferred", "MULTI_NODE_MULTI_WRITER"
    )
    undecided = {"crust.dev/defer": "runtime-class"}
    volume = Volume(made.volume_id, undecided, made.publish_context, many)
    await refused(cloud.stage(volume), Code.INVALID_ARGUMENT, "Volume capability is not supported")
    (passed,) = cloud.driver.calls("NodeStageVolume")
    assert passed == cloud.stage_request(volume)
