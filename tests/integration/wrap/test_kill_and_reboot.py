"""The shim is killed by kill -9 at each step, or the node reboots: the CO's next call goes on from there."""

import asyncio
import os

import grpc
import grpc.aio
import pytest

from crust.host.mounts import mountinfo
from tests.integration.wrap.conftest import Volume, Wrapped

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
Code = grpc.StatusCode
METHODS = ("NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume")


async def test_shim_killed_before_each_change_of_a_directory(node: Wrapped) -> None:
    volume, target = await node.volume(), node.target("one")
    died = 0
    while True:
        shim = await node.killable_shim(die_at=died)
        lives = True
        for step in node.life(volume, target).values():
            if not await node.survives(step()):
                lives = False
                await shim.ended()
                await node.killable_shim()
                await step()
        node.check_unpublished(volume, target)
        assert not os.path.lexists(node.paths(volume).staging)
        if lives:
            break
        died += 1
    assert died >= (5 if node.stages else 3)


@pytest.mark.parametrize("method", METHODS)
async def test_shim_killed_while_the_driver_works(cloud: Wrapped, method: str) -> None:
    volume, target = await cloud.volume(), cloud.target("one")
    shim = await cloud.killable_shim()
    for name, step in cloud.life(volume, target).items():
        if name == method:
            cloud.driver.misbehave(**{method: "hang"})
            call = asyncio.ensure_future(step())
            await asyncio.to_thread(cloud.driver.wait_hanging)
            await shim.kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is Code.UNAVAILABLE
            cloud.driver.release()
            cloud.driver.misbehave()
            await cloud.killable_shim()
        await step()
    cloud.check_unpublished(volume, target)


async def _rebooted(node: Wrapped) -> tuple[Volume, str]:
    """A volume that was published when the node rebooted."""
    volume, target = await node.published_volume()
    await node.reboot()
    assert node.driver.attached() == []
    return volume, target


@pytest.mark.spec("D-43")
async def test_stage_after_a_reboot_is_forwarded_despite_its_record(node: Wrapped) -> None:
    volume, target = await _rebooted(node)
    assert os.path.lexists(node.paths(volume).staging) == node.stages
    volume = await node.attach(volume)
    calls = len(node.driver.calls("NodeStageVolume"))
    await node.stage(volume)
    assert len(node.driver.calls("NodeStageVolume")) == calls + node.stages
    await node.publish(volume, target)
    assert [node.record(target).device] == node.driver.attached()


async def test_unpublish_and_unstage_after_a_reboot_leave_nothing(node: Wrapped) -> None:
    volume, target = await _rebooted(node)
    await node.unpublish(volume, target)
    await node.unstage(volume)
    if os.path.isdir(target):
        os.rmdir(target)  # a kubelet does: the proxy knows nothing of it any more


async def test_unstage_without_unpublish_after_a_reboot_clears_the_leaf(cloud: Wrapped) -> None:
    volume, _ = await _rebooted(cloud)
    assert os.listdir(cloud.paths(volume).published) != []
    await cloud.unstage(volume)
    assert not os.path.lexists(cloud.paths(volume).published)
    assert not os.path.lexists(cloud.paths(volume).staging)
    assert mountinfo.below(cloud.places.kubelet) == ()
