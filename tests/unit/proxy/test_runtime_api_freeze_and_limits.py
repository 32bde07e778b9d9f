"""Freezing and I/O limits of deferred volumes: what reaches the sandbox, what is recorded, and what is refused."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import errors, volumes
from crust.handoff.entry import Entry
from crust.handoff.store import Store
from crust.proxy import handler_calls
from crust.proxy.table import Entries
from crust.proxy.target import TargetRow
from crust.wire.v1 import runtime_pb2, types_pb2
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Gate
from tests.support.faults.refusals import refused, until
from tests.support.nodes.fake_node import FakeNode
from tests.support.runtimes.fake_handler import ALL_FEATURES, FakeHandler

Code = grpc.StatusCode
HandlerFeature = volumes.HandlerFeature


@pytest.mark.spec("D-29", "D-31")
async def test_freeze_keeps_the_filesystem_frozen_until_thaw(node: FakeNode, target: str) -> None:
    async with node.in_sandbox(target) as fake:
        assert (await node.freeze(target, 17)).frozen
        assert fake.frozen == {target: 17}
        assert (await node.thaw(target)).was_frozen
        assert not (await node.thaw(target)).was_frozen


@pytest.mark.spec("D-30")
async def test_freeze_without_sandbox_is_not_frozen(node: FakeNode, target: str) -> None:
    async with node.handler() as session:
        await node.co.publish("vol-1", target)
        assert not (await node.freeze(target)).frozen
        assert not (await node.thaw(target)).was_frozen
    await until(session.lost)
    assert not (await node.freeze(target)).frozen


@pytest.mark.spec("D-30")
async def test_held_claim_that_cannot_be_read_is_a_claim(node: FakeNode, target: str) -> None:
    """Of a newer runtime: nobody knows its sandbox, but the lock says that there is one."""
    async with node.deferred(target):
        with node.sandbox(target):
            paths = Store(node.places.volumes).layout.entry(volumes.TargetPath.parse(target))
            Path(paths.claim).write_text('{"schema": 2}')
            for call in (node.freeze(target), node.thaw(target)):
                await refused(call, Code.DATA_LOSS, "claim.json")
        assert not (await node.freeze(target)).frozen, "the lock is free"


@pytest.mark.spec("D-30")
async def test_freeze_of_a_volume_unknown_to_its_handler_fails(node: FakeNode, target: str) -> None:
    """NOT_FOUND of the handler must not arrive as the NOT_FOUND of a target that is not deferred."""
    async with node.in_sandbox(target, FakeHandler(error=errors.NotFound("no such volume"))):
        for call in (node.freeze(target), node.thaw(target)):
            await refused(call, Code.FAILED_PRECONDITION, "no such volume", "'kata'")


@pytest.mark.spec("D-30", "D-31")
@pytest.mark.parametrize(
    ("call", "answer"), [(FakeNode.freeze, "frozen"), (FakeNode.thaw, "was_frozen")]
)
async def test_freeze_of_sandbox_ending_during_call_is_not_frozen(
    node: FakeNode, target: str, call: Any, answer: str
) -> None:
    fake = FakeHandler(gate=Gate(), error=errors.NotReady("no sandbox has it"))
    assert fake.gate is not None
    async with node.deferred(target, fake=fake):
        with node.sandbox(target):
            asked = asyncio.ensure_future(call(node, target))
            await fake.gate.entered.wait()
        fake.gate.opened.set()
        assert getattr(await asked, answer) is False
        with node.sandbox(target):
            await refused(call(node, target), Code.FAILED_PRECONDITION, "no sandbox has it")


@pytest.mark.spec("D-30")
async def test_freeze_is_refused_if_the_handler_cannot_freeze(node: FakeNode, target: str) -> None:
    async with node.in_sandbox(target, features=ALL_FEATURES - {HandlerFeature.FREEZE}) as fake:
        await refused(
            node.freeze(target), Code.FAILED_PRECONDITION, "'kata'", "FREEZE", "stop the pod"
        )
        assert not (await node.thaw(target)).was_frozen
    assert fake.frozen == {}


@pytest.mark.parametrize("seconds", [-1, 0, 61, 2**62])
@pytest.mark.spec("D-29")
async def test_invalid_freeze_time_is_refused(node: FakeNode, target: str, seconds: int) -> None:
    async with node.in_sandbox(target) as fake:
        await refused(node.freeze(target, seconds), Code.INVALID_ARGUMENT, "from 1 to 60")
    assert fake.frozen == {}


async def test_freeze_of_target_not_deferred_is_not_found(kata: FakeNode) -> None:
    for call in (kata.freeze("/nowhere"), kata.thaw("/nowhere")):
        await refused(call, Code.NOT_FOUND, "/nowhere")
    await refused(kata.freeze("relative"), Code.INVALID_ARGUMENT, "relative")


async def test_thaw_waits_for_freeze_of_a_silent_guest(
    node: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has given up the freeze; that freeze must not take effect after the caller's thaw."""
    monkeypatch.setattr(handler_calls, "FREEZE_TIMEOUT_S", 0.05)
    async with node.gated_handler(target) as (fake, gate):
        with node.sandbox(target):
            while not gate.entered.is_set():  # the deadline may come before the handler is reached
                await refused(node.freeze(target), Code.UNAVAILABLE, "'kata'", "did not answer")
            thawing = asyncio.ensure_future(node.thaw(target))
            stats = asyncio.ensure_future(node.co.stats("vol-1", target))
            gate.opened.set()
            assert (await thawing).was_frozen
            await stats
    assert fake.frozen == {}


LIMITS = volumes.IoLimits(1, 2, 3, 4)
OTHER = volumes.IoLimits(write_iops=9)
NONE = volumes.IoLimits()
CANNOT = ALL_FEATURES - {HandlerFeature.IO_LIMITS}


def recorded(node: FakeNode, target: str) -> volumes.IoLimits:
    """The limits that the next sandbox would get."""
    return node.record(target).mount.io_limits


def generation(node: FakeNode, target: str) -> int:
    return node.record(target).crust.generation


@pytest.mark.spec("D-32")
async def test_limits_of_the_driver_are_in_the_record(kata: FakeNode, target: str) -> None:
    kata.driver.io_limits = LIMITS
    await kata.co.publish("vol-1", target)
    assert recorded(kata, target) == LIMITS


@pytest.mark.spec("D-33")
async def test_limits_reach_the_sandbox_and_the_record(node: FakeNode, target: str) -> None:
    async with node.deferred(target) as fake:
        before = generation(node, target)
        with node.sandbox(target):
            assert (await node.limit(target, LIMITS)).applied
            assert fake.limits == {target: LIMITS}
            assert (await node.limit(target, LIMITS)).applied
        assert (recorded(node, target), generation(node, target)) == (LIMITS, before + 1)
        assert not (await node.limit(target, NONE)).applied
        assert fake.limits == {target: LIMITS}, "no sandbox: no call of the handler"
        assert recorded(node, target) == NONE


@pytest.mark.spec("D-33")
async def test_sandbox_that_refuses_leaves_the_record(node: FakeNode, target: str) -> None:
    async with node.deferred(target) as fake:
        await node.limit(target, LIMITS)
        fake.error = errors.RuntimeFailed("QEMU refused it", hint="look")
        with node.sandbox(target):
            await refused(node.limit(target, OTHER), Code.INTERNAL, "QEMU refused it; look")
    assert recorded(node, target) == LIMITS


@pytest.mark.spec("D-33")
async def test_limits_are_restored_if_the_record_cannot_be_written(
    node: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.in_sandbox(target) as fake:
        await node.limit(target, LIMITS)

        def full(*_: object) -> None:
            raise errors.Exhausted("no space left")

        monkeypatch.setattr(Store, "rewrite", full)
        await refused(node.limit(target, OTHER), Code.RESOURCE_EXHAUSTED, "no space left")
    assert fake.limits == {target: LIMITS}


@pytest.mark.spec("D-33")
async def test_record_is_restored_if_what_follows_its_write_fails(
    node: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_of = Entries.row_of

    def fail(self: Entries, entry: Entry) -> TargetRow:  # a look that meets the record fails too
        if entry.require().mount.io_limits == OTHER:
            raise errors.Exhausted("no descriptor is left")
        return row_of(self, entry)

    async with node.in_sandbox(target) as fake:
        await node.limit(target, LIMITS)
        monkeypatch.setattr(Entries, "row_of", fail)
        await refused(node.limit(target, OTHER), Code.RESOURCE_EXHAUSTED, "no descriptor is left")
        assert fake.limits == {target: LIMITS}
        assert recorded(node, target) == LIMITS


@pytest.mark.spec("D-33")
@pytest.mark.parametrize("replaces", [False, True], ids=["the first", "in the place of another"])
async def test_sandbox_that_claims_during_the_write_gets_the_limits(
    node: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch, *, replaces: bool
) -> None:
    before = ExitStack()
    async with node.deferred(target) as fake:
        if replaces:
            before.enter_context(node.sandbox(target))
            before.callback(fake.limits.clear)
        begun = _sandbox_begins_with_the_next_rewrite(
            node, target, monkeypatch, before=before.close, name="sandbox-2"
        )
        assert (await node.limit(target, LIMITS)).applied
        begun.close()
    assert fake.limits == {target: LIMITS}
    assert recorded(node, target) == LIMITS


async def test_unpublish_is_refused_while_limits_are_written_and_succeeds_afterwards(
    node: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite, loop = Store.rewrite, asyncio.get_running_loop()

    def rewrite_then_unpublish(self: Store, *change: Any) -> Any:
        made = rewrite(self, *change)
        unpublishing = asyncio.run_coroutine_threadsafe(node.co.unpublish("vol-1", target), loop)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            unpublishing.result(30)
        assert caught.value.code() is Code.ABORTED
        return made

    async with node.deferred(target):
        monkeypatch.setattr(Store, "rewrite", rewrite_then_unpublish)
        await node.limit(target, LIMITS)
        monkeypatch.undo()
        await node.co.unpublish("vol-1", target)
        await refused(node.limit(target, LIMITS), Code.NOT_FOUND, target)
        assert node.entry(target) is None


@pytest.mark.spec("D-33")
async def test_sandbox_ending_after_it_got_limits_is_not_applied(
    node: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox, rewrite = ExitStack(), Store.rewrite

    def end_and_rewrite(self: Store, *change: Any) -> Any:
        sandbox.close()
        return rewrite(self, *change)

    async with node.deferred(target):
        sandbox.enter_context(node.sandbox(target))
        monkeypatch.setattr(Store, "rewrite", end_and_rewrite)
        assert not (await node.limit(target, LIMITS)).applied
    assert recorded(node, target) == LIMITS


@pytest.mark.spec("D-33")
async def test_refusal_by_a_sandbox_that_claimed_meanwhile_changes_nothing(
    node: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.deferred(
        target, fake=FakeHandler(error=errors.NotReady("it could not be mounted"))
    ):
        begun = _sandbox_begins_with_the_next_rewrite(node, target, monkeypatch)
        await refused(node.limit(target, LIMITS), Code.FAILED_PRECONDITION, "could not be mounted")
        begun.close()
    assert recorded(node, target) == NONE


@pytest.mark.spec("D-34")
@pytest.mark.parametrize("in_sandbox", [False, True])
async def test_limits_for_a_handler_that_cannot_enforce_them_are_refused(
    node: FakeNode, target: str, *, in_sandbox: bool
) -> None:
    async with node.deferred(target, features=CANNOT) as fake:
        with node.sandbox(target) if in_sandbox else nullcontext():
            words = ("'kata'", "does not offer IO_LIMITS")
            await refused(node.limit(target, LIMITS), Code.FAILED_PRECONDITION, *words)
            assert (await node.limit(target, NONE)).applied is in_sandbox
    assert (fake.limits, recorded(node, target)) == ({}, NONE)


async def test_invalid_limits_are_refused_and_nothing_changes(
    kata: FakeNode, published: str
) -> None:
    request = runtime_pb2.RuntimeSetVolumeLimitsRequest(
        volume_target_path=published, limits=types_pb2.IoLimits(read_iops=-1)
    )
    await refused(
        kata.runtime.RuntimeSetVolumeLimits(request, timeout=10), Code.INVALID_ARGUMENT, "read_iops"
    )
    await refused(kata.limit("/nowhere", LIMITS), Code.NOT_FOUND, "/nowhere")
    assert recorded(kata, published) == NONE


@pytest.mark.spec("D-35")
async def test_retried_publish_restores_no_older_limits(kata: FakeNode, target: str) -> None:
    kata.driver.io_limits = OTHER
    await kata.co.publish("vol-1", target)
    await kata.limit(target, LIMITS)
    await kata.co.publish("vol-1", target)
    with kata.sandbox(target):
        await kata.co.publish("vol-1", target)
    assert recorded(kata, target) == LIMITS


async def test_limits_are_refused_while_an_expansion_runs(node: FakeNode, target: str) -> None:
    async with node.gated_handler(target) as (_, gate):
        node.devices.sizes_bytes[fake_driver.device_of("vol-1")] = 128 * fake_driver.MIB
        with node.sandbox(target):
            growing = asyncio.create_task(node.co.expand("vol-1", target, 128 * fake_driver.MIB))
            await until(gate.entered)
            await refused(node.limit(target, LIMITS), Code.ABORTED, "RuntimeExpandVolume", "retry")
        gate.opened.set()
        await growing
        await node.limit(target, LIMITS)
    assert node.record(target).mount.capacity_bytes == 128 * fake_driver.MIB
    assert recorded(node, target) == LIMITS


async def test_identical_limits_join_and_others_are_refused(node: FakeNode, target: str) -> None:
    async with node.gated_handler(target) as (fake, gate):
        with node.sandbox(target):
            first = asyncio.ensure_future(node.limit(target, LIMITS))
            await until(gate.entered)
            await refused(
                node.limit(target, OTHER), Code.ABORTED, "RuntimeSetVolumeLimits", "retry"
            )
            first.cancel()
            joined = asyncio.ensure_future(node.limit(target, LIMITS))
            gate.opened.set()
            assert (await joined).applied
    assert (fake.limits, recorded(node, target)) == ({target: LIMITS}, LIMITS)


def _sandbox_begins_with_the_next_rewrite(
    node: FakeNode,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: Callable[[], None] = lambda: None,
    **options: Any,
) -> Any:
    """A sandbox claims the volume just before its record is written, so it has read the old record."""
    begun, rewrite = ExitStack(), Store.rewrite

    def begin_then_rewrite(self: Store, *change: Any) -> Any:
        monkeypatch.setattr(Store, "rewrite", rewrite)
        before()
        begun.enter_context(node.sandbox(target, **options))
        return rewrite(self, *change)

    monkeypatch.setattr(Store, "rewrite", begin_then_rewrite)
    return begun
