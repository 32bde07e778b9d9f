"""A publish that decides otherwise than the stage: the driver itself unstages and stages again."""

import asyncio
import os
import shutil
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from crust.host.mounts import mountinfo
from tests.integration.wrap.conftest import Volume, Wrapped, node_with
from tests.support.co import NAMED, capability
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.root
Code = grpc.StatusCode


@pytest.fixture
async def undecided() -> AsyncIterator[Wrapped]:
    """A node where no proxy says how to stage, so each publish decides, and volumes are staged as block."""
    async with node_with("cloud", is_decided=False) as running:
        yield running


async def test_host_publish_after_block_stage_stages_as_mount(undecided: Wrapped) -> None:
    volume, target = await undecided.staged_volume(context={})
    assert os.path.lexists(undecided.paths(volume).staging)
    assert not os.path.ismount(undecided.staging(volume))
    await undecided.publish(volume, target)
    assert os.path.ismount(target)
    assert not os.path.lexists(undecided.paths(volume).staging)
    asked = undecided.driver.calls("NodeStageVolume")
    assert asked[-1] == undecided.stage_request(volume)
    assert undecided.driver.names()[-4:] == [
        "NodeStageVolume", "NodeUnstageVolume", "NodeStageVolume", "NodePublishVolume",
    ]  # fmt: skip
    await undecided.publish(volume, target)
    assert undecided.driver.names()[-1:] == ["NodePublishVolume"]


async def test_deferred_publish_after_mount_stage_stages_as_block(cloud: Wrapped) -> None:
    volume, target = await cloud.staged_volume(context=NAMED)
    assert os.path.ismount(cloud.staging(volume))
    await cloud.publish(volume, target, flag=True)
    assert not os.path.ismount(cloud.staging(volume))
    assert cloud.entry(target) is not None


async def test_one_volume_in_turn_on_host_and_in_guest(undecided: Wrapped) -> None:
    volume, target = await undecided.staged_volume(context=NAMED)
    for flag in (True, False, True, False):
        await undecided.publish(volume, target, flag=flag)
        assert (undecided.entry(target) is not None) == flag
        await undecided.unpublish(volume, target)


@pytest.mark.spec("D-44")
@pytest.mark.parametrize("flag", [True, False], ids=["to block", "to mount"])
async def test_restarted_shim_without_secrets_refuses_until_pod_is_recreated(
    flag: bool,  # noqa: FBT001 - pytest's
) -> None:
    async with node_with("cloud", is_decided=flag) as node:
        volume, target = await node.staged_volume(context=NAMED)
        await node.restart("shim")
        calls = node.driver.names()
        await refused(
            node.publish(volume, target, flag=flag),
            Code.FAILED_PRECONDITION, "StageForgotten", "delete the pod and create it again",
        )  # fmt: skip
        assert node.driver.names() == calls
        await node.unpublish(volume, target)
        await node.unstage(volume)
        await node.stage(volume)
        await node.publish(volume, target, flag=flag)


async def test_publish_after_an_unstage_says_that_it_may_be_unstaged(cloud: Wrapped) -> None:
    """The shim blamed a restart of its own alone."""
    volume, target = await cloud.staged_volume(context=NAMED)
    await cloud.unstage(volume)
    await refused(
        cloud.publish(volume, target, flag=True),
        Code.FAILED_PRECONDITION, "StageForgotten", "it is not staged, or the shim was started after the stage",
    )  # fmt: skip


async def test_stage_without_secrets_is_repeated_from_the_publish(undecided: Wrapped) -> None:
    undecided.driver.misbehave(secrets="not needed")
    volume, target = await undecided.volume(context={"vendor": "1"}), undecided.target("one")
    await undecided.stage(volume, secrets={})
    await undecided.restart("shim")
    await undecided.publish(volume, target)
    assert undecided.driver.calls("NodeStageVolume")[-1] == undecided.stage_request(
        volume, secrets={}
    )


@pytest.mark.spec("D-44")
async def test_volume_that_host_has_is_not_unstaged_for_guest(cloud: Wrapped) -> None:
    volume, one, two = await cloud.volume(context=NAMED), cloud.target("one"), cloud.target("two")
    await cloud.stage(volume)
    await cloud.publish(volume, one)
    Path(one, "file").write_text("data", encoding="utf-8")
    calls = cloud.driver.names()
    await refused(
        cloud.publish(volume, two, flag=True), Code.FAILED_PRECONDITION, "PublishedOnHost", one
    )
    assert cloud.driver.names() == calls
    assert Path(one, "file").read_text(encoding="utf-8") == "data"
    await cloud.unpublish(volume, one)
    await cloud.publish(volume, two, flag=True)
    await refused(cloud.publish(volume, one), Code.FAILED_PRECONDITION, two)


async def test_volume_staged_for_a_guest_is_not_given_as_raw(cloud: Wrapped) -> None:
    volume, target = await cloud.volume(), cloud.target("one")
    raw = replace(volume, capability=capability(block=True))
    await cloud.stage(volume)
    calls = cloud.driver.names()
    for call in (cloud.stage(raw), cloud.publish(raw, target)):
        await refused(call, grpc.StatusCode.ALREADY_EXISTS, "StagedForMount")
    assert cloud.driver.names() == calls
    await cloud.publish(volume, target)


async def test_raw_volume_of_a_guests_old_id_is_staged(cloud: Wrapped) -> None:
    volume, target = await cloud.staged_volume()
    await cloud.reboot()
    raw = await cloud.attach(replace(volume, capability=capability(block=True)))
    assert os.path.lexists(cloud.paths(volume).staging)
    await cloud.stage(raw)
    assert not os.path.lexists(cloud.paths(volume).staging)
    await cloud.publish(raw, target)
    assert stat.S_ISBLK(os.stat(target).st_mode)


async def test_stage_that_fails_on_way_to_host_is_tried_again(undecided: Wrapped) -> None:
    volume, target = await undecided.staged_volume(context={})
    undecided.driver.misbehave(NodeStageVolume="fail INTERNAL no mount today")
    await refused(undecided.publish(volume, target), Code.INTERNAL, "no mount today")
    assert os.path.lexists(undecided.paths(volume).staging)
    undecided.driver.misbehave()
    await undecided.publish(volume, target)


@pytest.mark.spec("D-41")
async def test_default_of_the_proxy_decides_how_the_driver_stages() -> None:
    """A shim with another default of its own let the driver mount the volume, and unstage it for the guest."""
    async with node_with("cloud", defer="always") as node:
        volume, target = await node.staged_volume(context=NAMED)
        assert os.path.lexists(node.paths(volume).staging)
        await node.publish(volume, target)
        assert node.entry(target) is not None
        assert "NodeUnstageVolume" not in node.driver.names()


@pytest.mark.spec("D-41")
async def test_without_the_proxys_word_only_never_stages_as_asked(undecided: Wrapped) -> None:
    never = await undecided.volume("never", context={"crust.dev/defer": "never"})
    await undecided.stage(never)
    assert os.path.ismount(undecided.staging(never))
    assert not os.path.lexists(undecided.paths(never).staging)
    silent = await undecided.volume("silent", context={})
    await undecided.stage(silent)
    assert not os.path.ismount(undecided.staging(silent))
    assert os.path.lexists(undecided.paths(silent).staging)


@pytest.mark.spec("D-44")
async def test_refused_change_to_block_is_undone_by_host_publish(cloud: Wrapped) -> None:
    """Without the record the host publish passed, and a driver that does not look bound an empty directory."""
    volume, target = await cloud.staged_volume(context=NAMED)
    cloud.driver.misbehave(NodeStageVolume="fail INVALID_ARGUMENT no raw block for this volume")
    await refused(cloud.publish(volume, target, flag=True), Code.INVALID_ARGUMENT, "no raw block")
    assert not os.path.ismount(cloud.staging(volume))
    two = cloud.target("two")
    await refused(cloud.publish(volume, two), Code.INVALID_ARGUMENT, "no raw block")
    cloud.driver.misbehave()
    await cloud.publish(volume, two)
    assert os.path.ismount(cloud.staging(volume))
    assert os.path.ismount(two)
    assert not os.path.lexists(cloud.paths(volume).change)


async def test_refused_change_to_block_is_ended_by_unstage(cloud: Wrapped) -> None:
    volume, target = await cloud.staged_volume(context=NAMED)
    cloud.driver.misbehave(NodeStageVolume="fail INVALID_ARGUMENT no raw block for this volume")
    await refused(cloud.publish(volume, target, flag=True), Code.INVALID_ARGUMENT)
    await cloud.unpublish(volume, target)
    await cloud.unstage(volume)
    cloud.check_unpublished(volume, target)
    cloud.driver.misbehave()
    await cloud.stage(volume)
    assert os.path.ismount(cloud.staging(volume))


async def test_driver_that_removes_the_staging_directory_is_not_believed_unasked(
    undecided: Wrapped,
) -> None:
    volume, target = await undecided.staged_volume(context={})
    undecided.driver.misbehave(NodeStageVolume="fail INTERNAL no mount today")
    await refused(undecided.publish(volume, target), Code.INTERNAL, "no mount today")
    shutil.rmtree(undecided.paths(volume).staging)  # as many drivers do in NodeUnstageVolume
    undecided.driver.misbehave()
    await undecided.publish(volume, target)
    assert os.path.ismount(undecided.staging(volume))
    assert os.path.ismount(target)


async def test_deferred_publish_after_a_failed_change_stages_as_block(undecided: Wrapped) -> None:
    volume, target = await undecided.staged_volume(context=NAMED)
    undecided.driver.misbehave(NodeStageVolume="fail INTERNAL no mount today")
    await refused(undecided.publish(volume, target), Code.INTERNAL, "no mount today")
    undecided.driver.misbehave()
    staged, guest = len(undecided.driver.calls("NodeStageVolume")), undecided.target("two")
    await undecided.publish(volume, guest, flag=True)
    assert len(undecided.driver.calls("NodeStageVolume")) == staged + 1
    assert undecided.entry(guest) is not None


async def test_shim_killed_on_way_to_guest_binds_nothing_unstaged(cloud: Wrapped) -> None:
    volume = await cloud.volume(context=NAMED)
    guest, host = cloud.target("one"), cloud.target("two")
    unknown, died, lives = 0, 0, False
    while not lives:
        await cloud.killable_shim(die_at=died)
        await cloud.stage(volume)
        lives = await cloud.survives(cloud.publish(volume, guest, flag=True))
        await cloud.killable_shim()
        await cloud.unpublish(volume, guest)
        if os.path.lexists(cloud.paths(volume).change):
            unknown += 1
            await refused(cloud.publish(volume, host), Code.FAILED_PRECONDITION, "StageForgotten")
        await cloud.unstage(volume)
        cloud.check_unpublished(volume, guest)
        assert not os.path.lexists(cloud.paths(volume).change)
        died += 1
    assert died > 3
    assert unknown > 1


@pytest.mark.parametrize("flag", [True, False], ids=["to block", "to mount"])
async def test_secret_of_stage_is_not_in_error_of_publish(
    flag: bool,  # noqa: FBT001 - pytest's
) -> None:
    async with node_with("cloud", is_decided=flag) as node:
        volume, target = await node.staged_volume(context=NAMED)
        node.driver.misbehave(NodeStageVolume="fail INTERNAL cannot log in with correct-token")
        told = await refused(
            node.publish(volume, target, flag=flag), Code.INTERNAL, "cannot log in with"
        )
        assert "correct-token" not in told


async def test_shim_killed_on_way_to_host_is_cleared_by_unstage(
    undecided: Wrapped,
) -> None:
    volume, target = await undecided.volume(context={}), undecided.target("one")
    died = 0
    while True:
        shim = await undecided.killable_shim(die_at=died)
        staged = await undecided.survives(undecided.stage(volume))
        lives = staged and await undecided.survives(undecided.publish(volume, target))
        if not lives:
            await shim.ended()
            await undecided.killable_shim()
        await undecided.unpublish(volume, target)
        await undecided.unstage(volume)
        undecided.check_unpublished(volume, target)
        assert not os.path.lexists(undecided.paths(volume).staging)
        if lives and shim.is_alive:
            break
        died += 1
    assert died > 3


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
