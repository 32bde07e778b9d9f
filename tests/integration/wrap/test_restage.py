"""A publish that decides otherwise than the stage: the driver itself unstages and stages again."""

import os
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from crust.core.deferral_keys import Defer
from tests.integration.wrap.conftest import NAMED, Wrapped, node_with
from tests.support.co import capability
from tests.support.faults.refusals import refused

pytestmark = pytest.mark.root
Code = grpc.StatusCode


@pytest.fixture
async def undecided() -> AsyncIterator[Wrapped]:
    """A node where each publish decides, and volumes are therefore staged as block."""
    async with node_with("cloud", default=Defer.RUNTIME_CLASS) as running:
        yield running


async def test_host_publish_of_what_is_staged_as_block_stages_as_mount(
    undecided: Wrapped,
) -> None:
    node = undecided
    volume, target = await node.volume(context={}), node.target("one")
    await node.stage(volume)
    assert os.path.lexists(node.paths(volume).staging)
    assert not os.path.ismount(node.staging(volume))
    await node.publish(volume, target)
    assert os.path.ismount(target)
    assert not os.path.lexists(node.paths(volume).staging)
    asked = node.driver.calls("NodeStageVolume")
    assert asked[-1] == node.stage_request(volume)
    assert node.driver.names()[-4:] == [
        "NodeStageVolume", "NodeUnstageVolume", "NodeStageVolume", "NodePublishVolume",
    ]  # fmt: skip
    await node.publish(volume, target)
    assert node.driver.names()[-1:] == ["NodePublishVolume"]
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_deferred_publish_of_what_is_staged_as_mount_stages_as_block(
    cloud_node: Wrapped,
) -> None:
    node = cloud_node
    volume, target = await node.volume(context=NAMED), node.target("one")
    await node.stage(volume)
    assert os.path.ismount(node.staging(volume))
    await node.publish(volume, target, flag=True)
    assert not os.path.ismount(node.staging(volume))
    assert node.entry(target) is not None
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_one_volume_in_turn_on_the_host_and_in_a_guest(undecided: Wrapped) -> None:
    node = undecided
    volume, target = await node.volume(context=NAMED), node.target("one")
    await node.stage(volume)
    for flag in (True, False, True, False):
        await node.publish(volume, target, flag=flag)
        assert (node.entry(target) is not None) == flag
        await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


@pytest.mark.spec("D-44")
@pytest.mark.parametrize("flag", [True, False], ids=["to block", "to mount"])
async def test_after_a_restart_without_the_secrets_it_is_refused_until_the_pod_is_made_again(
    flag: bool,  # noqa: FBT001 - pytest's
) -> None:
    default = Defer.NEVER if flag else Defer.RUNTIME_CLASS
    async with node_with("cloud", default=default) as node:
        volume, target = await node.volume(context=NAMED), node.target("one")
        await node.stage(volume)
        await node.restart_shim()
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
        await node.unpublish(volume, target)
        await node.unstage(volume)
        await node.check_gone(volume, target)


async def test_stage_without_secrets_is_repeated_from_the_publish_after_a_restart(
    undecided: Wrapped,
) -> None:
    node = undecided
    node.driver.misbehave(secrets="not needed")
    volume, target = await node.volume(context={"vendor": "1"}), node.target("one")
    await node.stage(volume, secrets={})
    await node.restart_shim()
    await node.publish(volume, target)
    assert node.driver.calls("NodeStageVolume")[-1] == node.stage_request(volume, secrets={})
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


@pytest.mark.spec("D-44")
async def test_volume_that_the_host_has_is_not_unstaged_for_a_guest(cloud_node: Wrapped) -> None:
    node = cloud_node
    volume, one, two = await node.volume(context=NAMED), node.target("one"), node.target("two")
    await node.stage(volume)
    await node.publish(volume, one)
    Path(one, "file").write_text("data", encoding="utf-8")
    calls = node.driver.names()
    await refused(
        node.publish(volume, two, flag=True), Code.FAILED_PRECONDITION, "PublishedOnHost", one
    )
    assert node.driver.names() == calls
    assert Path(one, "file").read_text(encoding="utf-8") == "data"
    await node.unpublish(volume, one)
    await node.publish(volume, two, flag=True)
    await refused(node.publish(volume, one), Code.FAILED_PRECONDITION, two)
    await node.unpublish(volume, two)
    await node.unstage(volume)
    await node.check_gone(volume, two)


async def test_volume_that_is_staged_for_a_guest_is_not_given_as_raw_block_too(
    cloud_node: Wrapped,
) -> None:
    node = cloud_node
    volume, target = await node.volume(), node.target("one")
    raw = replace(volume, capability=capability(block=True))
    await node.stage(volume)
    calls = node.driver.names()
    for call in (node.stage(raw), node.publish(raw, target)):
        await refused(call, grpc.StatusCode.ALREADY_EXISTS, "StagedForMount")
    assert node.driver.names() == calls
    await node.publish(volume, target)
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


async def test_raw_block_volume_of_an_id_that_was_a_guests_before_the_reboot_is_staged(
    cloud_node: Wrapped,
) -> None:
    node = cloud_node
    volume, target = await node.volume(), node.target("one")
    await node.stage(volume)
    await node.reboot()
    raw = await node.attach(replace(volume, capability=capability(block=True)))
    assert os.path.lexists(node.paths(volume).staging)
    await node.stage(raw)
    assert not os.path.lexists(node.paths(volume).staging)
    await node.publish(raw, target)
    assert stat.S_ISBLK(os.stat(target).st_mode)
    await node.unpublish(raw, target)
    await node.unstage(raw)
    await node.check_gone(volume, target)


async def test_stage_that_fails_on_the_way_to_the_host_is_tried_again(undecided: Wrapped) -> None:
    node = undecided
    volume, target = await node.volume(context={}), node.target("one")
    await node.stage(volume)
    node.driver.misbehave(NodeStageVolume="fail INTERNAL no mount today")
    await refused(node.publish(volume, target), Code.INTERNAL, "no mount today")
    assert os.path.lexists(node.paths(volume).staging)
    node.driver.misbehave()
    await node.publish(volume, target)
    await node.unpublish(volume, target)
    await node.unstage(volume)
    await node.check_gone(volume, target)


@pytest.mark.parametrize("flag", [True, False], ids=["to block", "to mount"])
async def test_secret_of_the_stage_is_not_in_the_error_of_a_publish(
    flag: bool,  # noqa: FBT001 - pytest's
) -> None:
    default = Defer.NEVER if flag else Defer.RUNTIME_CLASS
    async with node_with("cloud", default=default) as node:
        volume, target = await node.volume(context=NAMED), node.target("one")
        await node.stage(volume)
        node.driver.misbehave(NodeStageVolume="fail INTERNAL cannot log in with correct-token")
        told = await refused(
            node.publish(volume, target, flag=flag), Code.INTERNAL, "cannot log in with"
        )
        assert "correct-token" not in told
        node.driver.misbehave()
        await node.unstage(volume)
        await node.check_gone(volume, target)


async def test_shim_killed_on_the_way_to_the_host_leaves_what_an_unstage_clears(
    undecided: Wrapped,
) -> None:
    node = undecided
    volume, target = await node.volume(context={}), node.target("one")
    died = 0
    while True:
        shim = await node.killable_shim(die_at=died)
        staged = await node.survives(node.stage(volume))
        lives = staged and await node.survives(node.publish(volume, target))
        if not lives:
            await shim.ended()
            await node.killable_shim()
        await node.unpublish(volume, target)
        await node.unstage(volume)
        node.check_unpublished(volume, target)
        assert not os.path.lexists(node.paths(volume).staging)
        if lives and shim.is_alive:
            break
        died += 1
    assert died > 3
    await node.check_gone(volume, target)
