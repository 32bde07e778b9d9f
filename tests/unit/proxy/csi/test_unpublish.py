"""Unpublish and unstage of deferred volumes: no detach under a live guest, and no orphan."""

import asyncio
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from crust.core import volumes
from crust.handoff import claims, layout
from crust.proxy.target import Seen
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import inspect_pb2
from tests.support.drivers.fake_driver import Failure, Gate
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.fake_targets import GUARD, FakeTargets
from tests.support.nodes.node import Node, Places, until

Code = grpc.StatusCode


def unstage(node: Node, volume_id: str) -> csi_pb2.NodeUnstageVolumeRequest:
    return csi_pb2.NodeUnstageVolumeRequest(
        volume_id=volume_id, staging_target_path=f"{node.places.kubelet}/staging"
    )


@pytest.mark.spec("D-18", "D-19")
async def test_unpublish_is_refused_while_a_sandbox_lives(kata: Node, published: str) -> None:
    with kata.sandbox(published, name="box-7"):
        await refused(
            kata.co.unpublish("vol-1", published), Code.FAILED_PRECONDITION, "box-7", "kata", "stop"
        )
        assert kata.driver.called("NodeUnpublishVolume") == []
        kata.check_published("vol-1", published)
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


async def test_unpublish_works_after_the_sandbox_died(kata: Node, published: str) -> None:
    """claim.json exists, but the lock is free: the claim is dead."""
    with kata.sandbox(published):
        entry = kata.entry(published)
        assert entry is not None
        path = layout.Layout(kata.places.volumes).entry(entry.digest).claim
        with open(path, "rb") as file:
            dead = file.read()
    with open(path, "wb") as file:
        file.write(dead)
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


async def test_no_sandbox_can_claim_during_an_unpublish(kata: Node, published: str) -> None:
    gate = kata.driver.gates["NodeUnpublishVolume"] = Gate()
    unpublish = asyncio.create_task(kata.co.unpublish("vol-1", published))
    await until(gate.entered)
    with pytest.raises(claims.HeldBySandbox), kata.sandbox(published):
        raise AssertionError("a claim while the volume is unpublished")
    gate.opened.set()
    await unpublish
    kata.check_untouched(published)


@pytest.mark.spec("D-18")
async def test_repeated_unpublish_is_ok_with_or_without_flag(kata: Node, published: str) -> None:
    await kata.co.unpublish("vol-1", published)
    await kata.co.unpublish("vol-1", published)
    await kata.co.unpublish("vol-1", published, flag=True)
    kata.check_untouched(published)


async def test_failing_driver_leaves_the_entry_for_the_retry(kata: Node, published: str) -> None:
    kata.driver.failures["NodeUnpublishVolume"] = Failure(Code.UNAVAILABLE, "not now")
    await refused(kata.co.unpublish("vol-1", published), Code.UNAVAILABLE, "not now")
    kata.check_published("vol-1", published)
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


async def test_unpublish_with_another_volume_id_is_refused(kata: Node, published: str) -> None:
    await refused(
        kata.co.unpublish("vol-2", published), Code.INVALID_ARGUMENT, "vol-2", "vol-1", published
    )
    kata.check_published("vol-1", published)


async def test_mount_over_the_guard_that_stays_keeps_the_entry(kata: Node, published: str) -> None:
    kata.targets.foreign.add(published)
    await refused(kata.co.unpublish("vol-1", published), Code.FAILED_PRECONDITION, "/dev/sdb1")
    assert kata.entry(published) is not None
    kata.targets.foreign.clear()
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


async def test_mount_over_the_guard_ends_with_the_unpublish(kata: Node, published: str) -> None:
    """A driver that mounts at a repeated publish although it was called with the flag."""
    kata.targets.foreign.add(published)
    kata.driver.after_unpublish = lambda: kata.targets.foreign.discard(published)
    await refused(kata.co.publish("vol-1", published), Code.UNAVAILABLE, "TargetMounted")
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


class HangingTargets(FakeTargets):
    """One target whose file server does not answer."""

    hung = ""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.answers = threading.Event()
        self.looks = 0

    def look(self, target: volumes.TargetPath) -> Seen:
        if target.text == self.hung:
            self.looks += 1
            self.answers.wait(30)
        return super().look(target)


def _lose_a_guard(places: Places) -> None:
    """A guard whose volume nobody knows: its record went with /run."""
    lost = places.target("lost")
    os.mkdir(lost)
    Path(lost, GUARD).touch()


async def test_retries_of_a_hanging_unpublish_take_one_thread(places: Places) -> None:
    _lose_a_guard(places)
    targets = HangingTargets(places.kubelet)
    targets.hung = places.target("hung")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
    async with nodes.running(places, targets=targets) as node, node.handler():
        for _ in range(6):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await node.co.unpublish("vol-hung", targets.hung, timeout_s=0.5)
            assert caught.value.code() in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
        await node.co.publish("vol-2", places.target("two"), timeout_s=5)
        assert targets.looks == 1
        targets.answers.set()


async def test_link_to_an_unknown_guard_does_not_reach_the_driver(places: Places) -> None:
    _lose_a_guard(places)
    link = f"{places.kubelet}/link"
    os.symlink(f"{places.kubelet}/pods/lost", link)
    async with nodes.running(places) as node:
        await refused(
            node.co.unpublish("vol-1", f"{link}/mount"), Code.INVALID_ARGUMENT, "a link leads"
        )
        assert node.driver.called("NodeUnpublishVolume") == []
        await node.co.unpublish("vol-1", places.target("lost"))
        assert not os.path.lexists(places.target("lost"))


async def test_unpublish_of_a_host_mount_uses_no_thread(places: Places, target: str) -> None:
    targets = HangingTargets(places.kubelet)
    async with nodes.running(places, targets=targets) as node:
        await node.co.publish("vol-1", target, defer=False)
        targets.hung = target
        await node.co.unpublish("vol-1", target)
        assert targets.looks == 0
        assert len(node.driver.called("NodeUnpublishVolume")) == 1


async def test_guard_without_entry_is_removed_by_unpublish(kata: Node, published: str) -> None:
    entry = kata.entry(published)
    assert entry is not None
    shutil.rmtree(entry.directory)
    answer = await kata.inspect.ListDeferredVolumes(
        inspect_pb2.ListDeferredVolumesRequest()
    )  # the proxy scans again
    assert list(answer.volumes) == []
    await kata.co.unpublish("vol-1", published)
    (call,) = kata.driver.called("NodeUnpublishVolume")
    assert call.request.defer_fs_ops
    kata.check_untouched(published)


async def test_other_spelling_of_the_target_is_refused(kata: Node, published: str) -> None:
    for odd in (f"{published}/", published.replace("/mount", "//mount")):
        await refused(kata.co.unpublish("vol-1", odd), Code.INVALID_ARGUMENT, "is invalid")
    assert kata.driver.called("NodeUnpublishVolume") == []
    kata.check_published("vol-1", published)


async def test_an_ordinary_volumes_unpublish_passes_as_it_is(node: Node, target: str) -> None:
    await node.co.publish("vol-1", target, defer=False)
    await node.co.unpublish("vol-1", target)
    (call,) = node.driver.called("NodeUnpublishVolume")
    assert not call.request.defer_fs_ops
    assert ("crust-extensions", "deferral") not in call.metadata


@pytest.mark.spec("D-22")
async def test_unstage_while_deferred_is_refused(kata: Node, published: str) -> None:
    await refused(
        kata.co.node.NodeUnstageVolume(unstage(kata, "vol-1"), timeout=10),
        Code.FAILED_PRECONDITION,
        "vol-1",
        published,
        "unpublish it there first",
    )
    assert kata.driver.called("NodeUnstageVolume") == []
    await kata.co.node.NodeUnstageVolume(unstage(kata, "vol-2"), timeout=10)
    await kata.co.unpublish("vol-1", published)
    await kata.co.node.NodeUnstageVolume(unstage(kata, "vol-1"), timeout=10)


async def test_unstage_during_a_publish_is_aborted(kata: Node, target: str) -> None:
    """There is no record yet: without the operation's key the driver would detach a device that is being
    published.
    """
    gate = kata.driver.gates["NodePublishVolume"] = Gate()
    publish = asyncio.create_task(kata.co.publish("vol-1", target))
    await until(gate.entered)
    await refused(
        kata.co.node.NodeUnstageVolume(unstage(kata, "vol-1"), timeout=10), Code.ABORTED, "vol-1"
    )
    gate.opened.set()
    await publish
    assert kata.driver.called("NodeUnstageVolume") == []


@pytest.mark.parametrize("flag", [False, True])
async def test_unpublish_does_not_overtake_a_publish(
    kata: Node, target: str, *, flag: bool
) -> None:
    """A kubelet unpublishes after its deadline: passed through, the call would succeed before the entry appears."""
    gate = kata.driver.gates["NodePublishVolume"] = Gate()
    publish = asyncio.create_task(kata.co.publish("vol-1", target))
    await until(gate.entered)
    call = kata.co.unpublish("vol-1", target, flag=flag)
    await refused(call, Code.ABORTED, "vol-1", "NodePublishVolume", "retry")
    assert kata.driver.called("NodeUnpublishVolume") == []
    gate.opened.set()
    await publish
    kata.check_published("vol-1", target)
    await kata.co.unpublish("vol-1", target)
    kata.check_untouched(target)
