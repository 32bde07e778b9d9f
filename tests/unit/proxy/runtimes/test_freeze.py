"""RuntimeFreezeVolume and RuntimeThawVolume: frozen, no sandbox, or an error."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import errors, volumes
from crust.handoff.store import Store
from crust.proxy import handler_calls
from crust.wire.v1 import runtime_pb2
from tests.support.drivers.fake_driver import Gate
from tests.support.faults.refusals import refused
from tests.support.nodes.node import Node, until
from tests.support.runtimes.fake_handler import ALL_FEATURES, FakeHandler

Code = grpc.StatusCode
Feature = volumes.HandlerFeature


def freeze(node: Node, target: str, thaw_after_s: int = 10, timeout_s: float = 10) -> Any:
    request = runtime_pb2.RuntimeFreezeVolumeRequest(
        volume_target_path=target, thaw_after_seconds=thaw_after_s
    )
    return node.runtime.RuntimeFreezeVolume(request, timeout=timeout_s)


def thaw(node: Node, target: str) -> Any:
    request = runtime_pb2.RuntimeThawVolumeRequest(volume_target_path=target)
    return node.runtime.RuntimeThawVolume(request, timeout=10)


@pytest.mark.spec("D-29", "D-31")
async def test_freeze_keeps_the_filesystem_frozen_until_thaw(node: Node, target: str) -> None:
    async with node.deferred(target) as fake:
        with node.sandbox(target):
            assert (await freeze(node, target, 17)).frozen
            assert fake.frozen == {target: 17}
            assert (await thaw(node, target)).was_frozen
            assert not (await thaw(node, target)).was_frozen


@pytest.mark.spec("D-30")
async def test_freeze_without_sandbox_is_not_frozen(node: Node, target: str) -> None:
    async with node.handler() as session:
        await node.co.publish("vol-1", target)
        assert not (await freeze(node, target)).frozen
        assert not (await thaw(node, target)).was_frozen
    await until(session.lost)
    assert not (await freeze(node, target)).frozen


@pytest.mark.spec("D-30")
async def test_held_claim_that_cannot_be_read_is_a_claim(node: Node, target: str) -> None:
    """Of a newer runtime: nobody knows its sandbox, but the lock says that there is one."""
    async with node.deferred(target):
        with node.sandbox(target):
            paths = Store(node.places.volumes).layout.entry(volumes.TargetPath.parse(target))
            Path(paths.claim).write_text('{"schema": 2}')
            for call in (freeze(node, target), thaw(node, target)):
                await refused(call, Code.DATA_LOSS, "claim.json")
        assert not (await freeze(node, target)).frozen, "the lock is free"


@pytest.mark.spec("D-30")
async def test_freeze_of_a_volume_unknown_to_its_handler_fails(node: Node, target: str) -> None:
    """NOT_FOUND of the handler must not arrive as the NOT_FOUND of a target that is not deferred."""
    async with node.deferred(target, FakeHandler(error=errors.NotFound("no such volume"))):
        with node.sandbox(target):
            for call in (freeze(node, target), thaw(node, target)):
                await refused(call, Code.FAILED_PRECONDITION, "no such volume", "'kata'")


@pytest.mark.spec("D-30", "D-31")
@pytest.mark.parametrize(("call", "answer"), [(freeze, "frozen"), (thaw, "was_frozen")])
async def test_freeze_of_a_sandbox_that_ends_during_the_call_is_not_frozen(
    node: Node, target: str, call: Any, answer: str
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
async def test_freeze_is_refused_if_the_handler_cannot_freeze(node: Node, target: str) -> None:
    async with node.deferred(target, features=ALL_FEATURES - {Feature.FREEZE}) as fake:
        with node.sandbox(target):
            await refused(
                freeze(node, target), Code.FAILED_PRECONDITION, "'kata'", "FREEZE", "stop the pod"
            )
            assert not (await thaw(node, target)).was_frozen
    assert fake.frozen == {}


@pytest.mark.parametrize("seconds", [-1, 0, 61, 2**62])
@pytest.mark.spec("D-29")
async def test_invalid_freeze_time_is_refused(node: Node, target: str, seconds: int) -> None:
    async with node.deferred(target) as fake:
        with node.sandbox(target):
            await refused(freeze(node, target, seconds), Code.INVALID_ARGUMENT, "from 1 to 60")
    assert fake.frozen == {}


async def test_a_target_that_is_not_deferred_is_not_found(kata: Node) -> None:
    for call in (freeze(kata, "/nowhere"), thaw(kata, "/nowhere")):
        await refused(call, Code.NOT_FOUND, "/nowhere")
    await refused(freeze(kata, "relative"), Code.INVALID_ARGUMENT, "relative")


async def test_a_guest_that_never_answers_is_unavailable_and_the_thaw_waits_for_it(
    node: Node, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has given up the freeze; that freeze must not take effect after the caller's thaw."""
    monkeypatch.setattr(handler_calls, "FREEZE_TIMEOUT_S", 0.05)
    async with node.gated_handler(target) as (fake, gate):
        with node.sandbox(target):
            while not gate.entered.is_set():  # the deadline may come before the handler is reached
                await refused(freeze(node, target), Code.UNAVAILABLE, "'kata'", "did not answer")
            thawing = asyncio.ensure_future(thaw(node, target))
            stats = asyncio.ensure_future(node.co.stats("vol-1", target))
            gate.opened.set()
            assert (await thawing).was_frozen
            await stats
    assert fake.frozen == {}
