"""Unpublish and unstage of deferred volumes: no detach under a live guest, and no orphan."""

import asyncio
import datetime
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import volumes
from crust.handoff import claims, layout
from crust.host import answers
from crust.host.process import processes
from crust.inspection import show
from crust.proxy.handlers import Handlers, RegisteredHandler
from crust.wire.v1 import inspect_pb2
from tests.support.drivers.fake_driver import Failure, Gate, device_of
from tests.support.faults.refusals import refused, until
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.fake_targets import MOUNTED
from tests.support.nodes.places import Places
from tests.unit.proxy.conftest import lose_a_guard

Code = grpc.StatusCode
OPTED_IN = ("crust-extensions", "deferral")


@pytest.mark.spec("D-18", "D-19")
async def test_unpublish_is_refused_while_a_sandbox_lives(kata: FakeNode, published: str) -> None:
    with kata.sandbox(published, name="box-7"):
        await refused(
            kata.co.unpublish("vol-1", published), Code.FAILED_PRECONDITION, "box-7", "kata", "stop"
        )
        assert kata.driver.called("NodeUnpublishVolume") == []
        kata.check_published("vol-1", published)
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


async def test_unpublish_that_is_refused_again_stands_in_status(
    kata: FakeNode, published: str
) -> None:
    """Kubernetes shows the refusal to no user; a slow end of a pod is refused once."""
    with kata.sandbox(published, name="box-7"):
        for _ in range(2):
            assert await _problems(kata) == []
            await refused(kata.co.unpublish("vol-1", published), Code.FAILED_PRECONDITION)
        shown = await show.answer(kata.places.run, show.status)
        assert shown.healthy, "another pod could start"
        assert f"unpublish of {published}" in shown.rendered("json").plain
        assert "sandbox box-7 of kata has it" in shown.rendered("json").plain
        await kata.co.publish("vol-1", published)
        assert await _problems(kata) == []
        for _ in range(3):
            await refused(kata.co.unpublish("vol-1", published), Code.FAILED_PRECONDITION)
    assert await _problems(kata) == ["UnpublishRefused"]
    await kata.co.unpublish("vol-1", published)
    assert await _problems(kata) == []


async def _problems(node: FakeNode) -> list[str]:
    answer = await node.inspect.GetHealth(inspect_pb2.GetHealthRequest())
    return [condition.error_name for condition in answer.conditions]


@pytest.fixture
def machine() -> Iterator["subprocess.Popen[bytes]"]:
    """The process of a virtual machine."""
    with subprocess.Popen(["sleep", "inf"]) as process:
        yield process
        process.kill()


@pytest.mark.spec("H-17")
async def test_unpublish_is_refused_while_process_of_dead_claim_lives(
    kata: FakeNode, published: str, machine: "subprocess.Popen[bytes]"
) -> None:
    """Keeper and standby were killed: the lock is free, and the VM has the device."""
    claim = _left_by(kata, published, machine.pid)
    for _ in range(2):
        await refused(
            kata.co.unpublish("vol-1", published),
            Code.FAILED_PRECONDITION,
            f"process {machine.pid} of sandbox box-7 of kata runs",
        )
    assert kata.driver.called("NodeUnpublishVolume") == []
    assert claims.read(layout.Layout(kata.places.volumes).entry(claim)) is not None
    kata.check_published("vol-1", published)
    listed = await kata.inspect.ListDeferredVolumes(
        inspect_pb2.ListDeferredVolumesRequest(), timeout=10
    )
    assert f"its process {machine.pid} runs" in listed.volumes[0].message
    machine.kill()
    machine.wait()
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


@pytest.mark.spec("H-17")
async def test_refused_unpublish_keeps_the_dead_claim(kata: FakeNode, published: str) -> None:
    """The driver refuses: what a runtime needs to claim the volume again is there (H-46)."""
    target = _left_by(kata, published, 0)
    paths = layout.Layout(kata.places.volumes).entry(target)
    before = claims.read(paths)
    kata.driver.failures["NodeUnpublishVolume"] = Failure(Code.UNAVAILABLE, "not now")
    await refused(kata.co.unpublish("vol-1", published), Code.UNAVAILABLE, "not now")
    assert claims.read(paths) == before
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


@pytest.mark.spec("H-17")
async def test_unpublish_is_refused_while_an_unnamed_process_writes(
    kata: FakeNode, published: str
) -> None:
    """No claim.json names it: the open files of all processes do."""
    kata.targets.written.add(device_of("vol-1"))
    refusal = kata.co.unpublish("vol-1", published)
    await refused(refusal, Code.FAILED_PRECONDITION, "DeviceInUse", "qemu[1000]")
    assert kata.driver.called("NodeUnpublishVolume") == []
    kata.check_published("vol-1", published)
    kata.targets.written.clear()
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


@pytest.mark.spec("H-17")
async def test_unpublish_after_the_claims_process_waits_for_its_writes(
    kata: FakeNode, published: str, machine: "subprocess.Popen[bytes]"
) -> None:
    """Its end is known, so no open file is looked at."""
    _left_by(kata, published, machine.pid)
    machine.kill()
    machine.wait()
    kata.targets.written.add(device_of("vol-1"))
    kata.targets.in_flight.add(device_of("vol-1"))
    refusal = kata.co.unpublish("vol-1", published)
    await refused(refusal, Code.UNAVAILABLE, "WritesInFlight")
    assert kata.driver.called("NodeUnpublishVolume") == []
    kata.targets.in_flight.clear()
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


def _left_by(node: FakeNode, target: str, pid: int) -> volumes.TargetPath:
    """The dead claim of a sandbox; 0: it names no process."""
    parsed = volumes.TargetPath.parse(target)
    paths = layout.Layout(node.places.volumes).entry(parsed)
    process = answers.seen(processes.of(pid)) if pid else None
    now = datetime.datetime.now(datetime.UTC)
    state = claims.State.MOUNTED
    with claims.ClaimLock.acquire(paths, parsed):
        claim = claims.Claim("box-7", "kata", state, "", pid, now, live=False, process=process)
        claims.write(paths, claim)
    return parsed


async def test_no_sandbox_can_claim_during_an_unpublish(kata: FakeNode, published: str) -> None:
    gate = kata.driver.gates["NodeUnpublishVolume"] = Gate()
    unpublish = asyncio.create_task(kata.co.unpublish("vol-1", published))
    await until(gate.entered)
    with pytest.raises(claims.HeldBySandbox), kata.sandbox(published):
        raise AssertionError("a claim while the volume is unpublished")
    await refused(kata.co.publish("vol-2", published), Code.ABORTED, published)
    gate.opened.set()
    await unpublish
    kata.check_untouched(published)


async def test_failing_driver_leaves_the_entry_for_the_retry(
    kata: FakeNode, published: str
) -> None:
    kata.driver.failures["NodeUnpublishVolume"] = Failure(Code.UNAVAILABLE, "not now")
    await refused(kata.co.unpublish("vol-1", published), Code.UNAVAILABLE, "not now")
    (call,) = kata.driver.called("NodeUnpublishVolume")
    assert call.request.defer_fs_ops
    assert OPTED_IN in call.metadata
    with kata.sandbox(published, name="box-8"):
        listing = inspect_pb2.ListDeferredVolumesRequest()
        assert "box-8" in str(await kata.inspect.ListDeferredVolumes(listing, timeout=10))
    kata.check_published("vol-1", published)
    for flag in (False, False, True):
        await kata.co.unpublish("vol-1", published, flag=flag)
        kata.check_untouched(published)
    assert OPTED_IN in kata.driver.called("NodeUnpublishVolume")[-1].metadata


@pytest.mark.parametrize(
    ("volume_id", "spelling", "code", "words"),
    [
        ("vol-2", "{}", Code.NOT_FOUND, ("vol-2", "vol-1")),
        ("vol-1", "{}/", Code.INVALID_ARGUMENT, ("is invalid",)),
        ("vol-1", "/{}", Code.INVALID_ARGUMENT, ("is invalid",)),
    ],
)
async def test_unpublish_of_another_volume_or_spelling_is_refused(
    kata: FakeNode,
    published: str,
    volume_id: str,
    spelling: str,
    code: grpc.StatusCode,
    words: tuple[str, ...],
) -> None:
    unpublish = kata.co.unpublish(volume_id, spelling.format(published))
    await refused(unpublish, code, *words)
    assert kata.driver.called("NodeUnpublishVolume") == []
    with kata.sandbox(published):
        kata.check_published("vol-1", published)


async def test_mount_over_the_guard_that_stays_keeps_the_entry(
    kata: FakeNode, published: str
) -> None:
    kata.targets.foreign.add(published)
    await refused(kata.co.unpublish("vol-1", published), Code.FAILED_PRECONDITION, "/dev/sdb1")
    assert kata.entry(published) is not None
    kata.targets.foreign.clear()
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


async def test_mount_over_the_guard_ends_with_the_unpublish(kata: FakeNode, published: str) -> None:
    """A driver that mounts at a repeated publish although it was called with the flag."""
    kata.targets.foreign.add(published)
    kata.driver.after["NodeUnpublishVolume"] = lambda: kata.targets.foreign.discard(published)
    await refused(kata.co.publish("vol-1", published), Code.UNAVAILABLE, "TargetMounted")
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


async def test_link_to_a_known_guard_does_not_reach_the_driver(
    kata: FakeNode, published: str
) -> None:
    link = f"{kata.places.kubelet}/link"
    os.symlink(os.path.dirname(published), link)
    for _ in ("a guard", "a mount over it"):
        call = kata.co.unpublish("vol-1", f"{link}/mount")
        await refused(call, Code.INVALID_ARGUMENT, "a link leads")
        Path(published, MOUNTED).touch()
    assert kata.driver.called("NodeUnpublishVolume") == []


async def test_link_to_an_unknown_guard_does_not_reach_the_driver(places: Places) -> None:
    lose_a_guard(places)
    link = f"{places.kubelet}/link"
    os.symlink(os.path.dirname(places.target("lost")), link)
    async with FakeNode(places) as node:
        await refused(
            node.co.unpublish("vol-1", f"{link}/mount"), Code.INVALID_ARGUMENT, "a link leads"
        )
        assert node.driver.called("NodeUnpublishVolume") == []
        await node.co.unpublish("vol-1", places.target("lost"))
        assert not os.path.lexists(places.target("lost"))


async def test_unpublish_of_ordinary_volume_passes_as_it_is(node: FakeNode, target: str) -> None:
    await node.co.publish("vol-1", target, defer=False)
    await node.co.unpublish("vol-1", target)
    (call,) = node.driver.called("NodeUnpublishVolume")
    assert not call.request.defer_fs_ops
    assert OPTED_IN not in call.metadata


@pytest.mark.spec("D-22")
async def test_unstage_while_deferred_is_refused(kata: FakeNode, published: str) -> None:
    staging = f"{kata.places.kubelet}/staging"
    words = ("vol-1", published, "unpublish it there first")
    await refused(kata.co.unstage("vol-1", staging), Code.FAILED_PRECONDITION, *words)
    assert kata.driver.called("NodeUnstageVolume") == []
    await kata.co.unstage("vol-2", staging)
    await kata.co.unpublish("vol-1", published)
    await kata.co.unstage("vol-1", staging)


async def test_unstage_during_a_publish_is_aborted(kata: FakeNode, target: str) -> None:
    """There is no record yet: without the operation's key the driver would detach the device of the publish."""
    gate = kata.driver.gates["NodePublishVolume"] = Gate()
    publish = asyncio.create_task(kata.co.publish("vol-1", target))
    await until(gate.entered)
    await refused(kata.co.unstage("vol-1", "/staging"), Code.ABORTED, "vol-1")
    gate.opened.set()
    await publish
    assert kata.driver.called("NodeUnstageVolume") == []


@pytest.mark.parametrize("flag", [False, True])
async def test_unpublish_does_not_overtake_a_publish(
    kata: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch, *, flag: bool
) -> None:
    """A kubelet unpublishes after its deadline: passed through, the call would succeed before the entry appears."""
    early, choose = Gate(), Handlers.choose

    async def wait_and_choose(*arguments: Any) -> RegisteredHandler:
        await early.stop()
        return await choose(*arguments)

    monkeypatch.setattr(Handlers, "choose", wait_and_choose)
    late = kata.driver.gates["NodePublishVolume"] = Gate()
    publish = asyncio.create_task(kata.co.publish("vol-1", target))
    for gate in (early, late):
        await until(gate.entered)
        call = kata.co.unpublish("vol-1", target, flag=flag)
        await refused(call, Code.ABORTED, "vol-1", "NodePublishVolume", "retry")
        assert kata.driver.called("NodeUnpublishVolume") == []
        gate.opened.set()
    await publish
    kata.check_published("vol-1", target)
    await kata.co.unpublish("vol-1", target)
    kata.check_untouched(target)


async def test_unpublish_of_an_entry_that_somebody_moved_is_ok(
    kata: FakeNode, published: str
) -> None:
    """As operations.md says, an operator moves an entry; the test does not wait for the next look."""
    entry = layout.Layout(kata.places.volumes).entry(volumes.TargetPath(published))
    shutil.move(entry.directory, f"{kata.places.root}/moved")
    await kata.co.unpublish("vol-1", published)
    assert published not in kata.driver.published
    assert not os.path.lexists(published)
    await kata.co.unpublish("vol-1", published)
