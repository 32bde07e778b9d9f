"""I/O limits of deferred volumes: in the record from the publish on, changed in sandbox and record, or in neither."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import grpc
import pytest

from crust.core import errors, volumes
from crust.handoff.store import Store
from crust.rpc.messages import crust_v1
from crust.wire.v1 import runtime_pb2, types_pb2
from tests.support.drivers import fake_driver
from tests.support.faults.refusals import refused
from tests.support.nodes.node import Node, until
from tests.support.runtimes.fake_handler import ALL_FEATURES, FakeHandler

Code = grpc.StatusCode
LIMITS = volumes.IoLimits(1, 2, 3, 4)
OTHER = volumes.IoLimits(write_iops=9)
NONE = volumes.IoLimits()
CANNOT = ALL_FEATURES - {volumes.HandlerFeature.IO_LIMITS}


def limit(node: Node, target: str, limits: volumes.IoLimits = LIMITS) -> Any:
    request = runtime_pb2.RuntimeSetVolumeLimitsRequest(
        volume_target_path=target, limits=crust_v1.io_limits_to_wire(limits)
    )
    return node.runtime.RuntimeSetVolumeLimits(request, timeout=10)


def recorded(node: Node, target: str) -> volumes.IoLimits:
    """The limits that the next sandbox would get."""
    return node.record(target).mount.io_limits


def generation(node: Node, target: str) -> int:
    return node.record(target).generation


@pytest.mark.spec("D-32")
async def test_limits_of_the_driver_are_in_the_record(kata: Node, target: str) -> None:
    kata.driver.io_limits = LIMITS
    await kata.co.publish("vol-1", target)
    assert recorded(kata, target) == LIMITS


@pytest.mark.spec("D-33")
async def test_limits_reach_the_sandbox_and_the_record(node: Node, target: str) -> None:
    async with node.deferred(target) as fake:
        before = generation(node, target)
        with node.sandbox(target):
            assert (await limit(node, target)).applied
            assert fake.limits == {target: LIMITS}
            assert (await limit(node, target)).applied
        assert (recorded(node, target), generation(node, target)) == (LIMITS, before + 1)
        assert not (await limit(node, target, NONE)).applied
        assert fake.limits == {target: LIMITS}, "no sandbox: no call of the handler"
        assert recorded(node, target) == NONE


@pytest.mark.spec("D-33")
async def test_a_sandbox_that_refuses_leaves_the_record_as_it_was(node: Node, target: str) -> None:
    async with node.deferred(target) as fake:
        await limit(node, target)
        fake.error = errors.RuntimeFailed("QEMU refused it", hint="look")
        with node.sandbox(target):
            await refused(limit(node, target, OTHER), Code.INTERNAL, "QEMU refused it; look")
    assert recorded(node, target) == LIMITS


@pytest.mark.spec("D-33")
async def test_limits_are_restored_if_the_record_cannot_be_written(
    node: Node, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.deferred(target) as fake:
        with node.sandbox(target):
            await limit(node, target)

            def full(*_: object) -> None:
                raise errors.Exhausted("no space left")

            monkeypatch.setattr(Store, "rewrite", full)
            await refused(limit(node, target, OTHER), Code.RESOURCE_EXHAUSTED, "no space left")
    assert fake.limits == {target: LIMITS}


@pytest.mark.spec("D-33")
@pytest.mark.parametrize("replaces", [False, True], ids=["the first", "in the place of another"])
async def test_sandbox_that_claims_during_the_write_gets_the_limits(
    node: Node, target: str, monkeypatch: pytest.MonkeyPatch, *, replaces: bool
) -> None:
    before = ExitStack()
    async with node.deferred(target) as fake:
        if replaces:
            before.enter_context(node.sandbox(target))
            before.callback(fake.limits.clear)
        begun = _sandbox_begins_with_the_next_rewrite(
            node, target, monkeypatch, before=before.close, name="sandbox-2"
        )
        assert (await limit(node, target)).applied
        begun.close()
    assert fake.limits == {target: LIMITS}
    assert recorded(node, target) == LIMITS


async def test_unpublish_is_refused_while_limits_are_written_and_succeeds_afterwards(
    node: Node, target: str, monkeypatch: pytest.MonkeyPatch
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
        await limit(node, target)
        monkeypatch.undo()
        await node.co.unpublish("vol-1", target)
        await refused(limit(node, target), Code.NOT_FOUND, target)
        assert node.entry(target) is None


@pytest.mark.spec("D-33")
async def test_sandbox_that_ends_after_it_got_the_limits_is_not_applied(
    node: Node, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox, rewrite = ExitStack(), Store.rewrite

    def end_and_rewrite(self: Store, *change: Any) -> Any:
        sandbox.close()
        return rewrite(self, *change)

    async with node.deferred(target):
        sandbox.enter_context(node.sandbox(target))
        monkeypatch.setattr(Store, "rewrite", end_and_rewrite)
        assert not (await limit(node, target)).applied
    assert recorded(node, target) == LIMITS


@pytest.mark.spec("D-33")
async def test_refusal_by_a_sandbox_that_claimed_meanwhile_changes_nothing(
    node: Node, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.deferred(
        target, fake=FakeHandler(error=errors.NotReady("it could not be mounted"))
    ):
        begun = _sandbox_begins_with_the_next_rewrite(node, target, monkeypatch)
        await refused(limit(node, target), Code.FAILED_PRECONDITION, "could not be mounted")
        begun.close()
    assert recorded(node, target) == NONE


@pytest.mark.spec("D-34")
@pytest.mark.parametrize("in_sandbox", [False, True])
async def test_limits_for_a_handler_that_cannot_enforce_them_are_refused(
    node: Node, target: str, *, in_sandbox: bool
) -> None:
    async with node.deferred(target, features=CANNOT) as fake:
        with node.sandbox(target) if in_sandbox else nullcontext():
            words = ("'kata'", "does not offer IO_LIMITS")
            await refused(limit(node, target), Code.FAILED_PRECONDITION, *words)
            assert (await limit(node, target, NONE)).applied is in_sandbox
    assert (fake.limits, recorded(node, target)) == ({}, NONE)


async def test_invalid_limits_are_refused_and_nothing_changes(kata: Node, published: str) -> None:
    request = runtime_pb2.RuntimeSetVolumeLimitsRequest(
        volume_target_path=published, limits=types_pb2.IoLimits(read_iops=-1)
    )
    await refused(
        kata.runtime.RuntimeSetVolumeLimits(request, timeout=10), Code.INVALID_ARGUMENT, "read_iops"
    )
    await refused(limit(kata, "/nowhere"), Code.NOT_FOUND, "/nowhere")
    assert recorded(kata, published) == NONE


@pytest.mark.spec("D-35")
async def test_retried_publish_restores_no_older_limits(kata: Node, target: str) -> None:
    kata.driver.io_limits = OTHER
    await kata.co.publish("vol-1", target)
    await limit(kata, target)
    await kata.co.publish("vol-1", target)
    with kata.sandbox(target):
        await kata.co.publish("vol-1", target)
    assert recorded(kata, target) == LIMITS


async def test_limits_are_refused_while_an_expansion_runs(node: Node, target: str) -> None:
    async with node.gated_handler(target) as (_, gate):
        node.devices.sizes_bytes[fake_driver.device_of("vol-1")] = 128 * fake_driver.MIB
        with node.sandbox(target):
            growing = asyncio.create_task(node.co.expand("vol-1", target, 128 * fake_driver.MIB))
            await until(gate.entered)
            await refused(limit(node, target), Code.ABORTED, "RuntimeExpandVolume", "retry")
        gate.opened.set()
        await growing
        await limit(node, target)
    assert node.record(target).mount.capacity_bytes == 128 * fake_driver.MIB
    assert recorded(node, target) == LIMITS


async def test_identical_limits_join_and_others_are_refused(node: Node, target: str) -> None:
    async with node.gated_handler(target) as (fake, gate):
        with node.sandbox(target):
            first = asyncio.ensure_future(limit(node, target))
            await until(gate.entered)
            await refused(
                limit(node, target, OTHER), Code.ABORTED, "RuntimeSetVolumeLimits", "retry"
            )
            first.cancel()
            joined = asyncio.ensure_future(limit(node, target))
            gate.opened.set()
            assert (await joined).applied
    assert (fake.limits, recorded(node, target)) == ({target: LIMITS}, LIMITS)


def _sandbox_begins_with_the_next_rewrite(
    node: Node,
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
