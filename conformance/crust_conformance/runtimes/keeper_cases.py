"""Keepers: they hold a claim for a hypervisor that takes no descriptors, and may all be killed."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from crust_conformance.runtimes.subject import KEEPER, RuntimeUnderTest

_PATIENCE_S = 5.0
"""After this a runtime that kills a hypervisor too soon has done it."""


async def test_r110_one_killed(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    for pid in (await subject.keepers(target))[:2]:
        subject.transcript.append(f"(SIGKILL to process {pid} of the keeper)")
        await subject.kill_processes([pid])
        assert subject.is_held(target), f"the lock is free after the end of process {pid} alone"
        keepers = await subject.keepers(target)
        assert pid not in keepers, "the other process of the keeper has not replaced it"


async def test_r111_signals(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    keepers = await subject.keepers(target)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        subject.transcript.append(f"({number.name} to the keeper)")
        for pid in keepers:
            os.kill(pid, number)
    assert not await subject.ended(keepers, within_s=1.0), "a process of the keeper has ended"
    assert subject.is_held(target), "the lock is free"


async def test_r112_session(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    for pid in await subject.keepers(target):
        assert os.getsid(pid) != subject.session, f"process {pid} is in the session of the runtime"


async def test_r113_all_killed(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    keepers, machine = await subject.keepers(target), subject.claimed_pid(target)
    for pid in keepers:
        os.kill(pid, signal.SIGSTOP)  # so that no process replaces a killed one
    subject.transcript.append(f"(SIGKILL to all processes of the keeper: {keepers})")
    await subject.kill_processes(keepers)
    if not await subject.claimed_again_or_ended(target, machine):
        raise AssertionError("no live claim names a sandbox, and the hypervisor lives")
    claim = subject.proxy.claim(target)
    if claim is not None and claim.live:
        assert claim.sandbox_id == "box-1", "claim.json names another sandbox"


@contextlib.asynccontextmanager
async def _without_keeper(subject: RuntimeUnderTest, target: str) -> AsyncIterator[int]:
    """A claim that nobody holds, and a hypervisor that lives; returns its pid. The runtime is stopped meanwhile.

    Skips the case if another process has a copy of the lock.
    """
    keepers, machine = await subject.keepers(target), subject.claimed_pid(target)
    async with subject.command_stopped():
        for pid in keepers:
            os.kill(pid, signal.SIGSTOP)  # so that no process replaces a killed one
        subject.transcript.append(f"(SIGKILL to all processes of the keeper: {keepers})")
        await subject.kill_processes(keepers)
        if subject.is_held(target):
            pytest.skip(KEEPER)
        yield machine


async def test_r125_held_by_another(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    with contextlib.ExitStack() as taken:
        async with _without_keeper(subject, target) as machine:
            taken.enter_context(subject.held_by_another(target))
        assert await subject.ended([machine]), (
            "another sandbox has the volume, and the hypervisor lives"
        )


async def test_r126_had_by_another(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    async with _without_keeper(subject, target) as machine:
        subject.leave_claim(target)
    assert await subject.ended([machine]), (
        "another sandbox had the volume, and the hypervisor lives"
    )


async def test_r127_held_without_a_name(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    async with contextlib.AsyncExitStack() as taken:
        async with _without_keeper(subject, target) as machine:
            taken.enter_context(subject.held_by_another(target, is_named=False))
        await _lives_and_is_claimed_again(subject, target, machine, taken)


async def test_r128_lost_claim(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    async with contextlib.AsyncExitStack() as lost:
        async with _without_keeper(subject, target) as machine:
            await lost.enter_async_context(subject.claim_lost(target))
        await _lives_and_is_claimed_again(subject, target, machine, lost)


async def _lives_and_is_claimed_again(
    subject: RuntimeUnderTest, target: str, machine: int, hindered: contextlib.AsyncExitStack
) -> None:
    """The hypervisor lives while the claim cannot be taken, and is claimed for when it can be."""
    is_killed = await subject.ended([machine], within_s=_PATIENCE_S)
    assert not is_killed, "no other sandbox has the volume, and the hypervisor was killed"
    await hindered.aclose()
    await subject.claimed_again_or_ended(target, machine, within_s=subject.timeout_s)
    assert not await subject.ended([machine], within_s=0), "the hypervisor was killed"
    claim = subject.proxy.claim(target)
    assert claim is not None, "there is no claim.json"
    assert (claim.live, claim.sandbox_id) == (True, "box-1"), "the sandbox has no claim again"
