"""Who is let in while a gate is closed, reopened, or leads to a successor."""

import asyncio
from collections.abc import Awaitable

import grpc.aio
import pytest

from crust.rpc.serving.gate import Gate, needs_state


async def _settle() -> None:
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


class Caller:
    """Enters a gate, and stays inside until a test lets it leave."""

    def __init__(self, gate: Gate) -> None:
        self.inside = asyncio.Event()
        self.leaves = asyncio.Event()
        self.answered_by: grpc.aio.Channel | None = None
        self.task = asyncio.create_task(self._call(gate))

    async def _call(self, gate: Gate) -> None:
        async with gate.entered() as successor:
            self.answered_by = successor
            self.inside.set()
            await self.leaves.wait()


async def _ends(waited_for: Awaitable[object]) -> bool:
    """Whether it ends without anybody doing anything."""
    task = asyncio.ensure_future(waited_for)
    await _settle()
    ended = task.done()
    task.cancel()
    return ended


async def test_reopened_gate_lets_everybody_in_who_waited_and_those_who_come_later() -> None:
    gate = Gate()
    gate.close()
    waited = [Caller(gate) for _ in range(3)]
    await _settle()
    assert not any(each.inside.is_set() for each in waited)
    gate.reopen()
    later = Caller(gate)
    await _settle()
    assert all(each.inside.is_set() and each.answered_by is None for each in (*waited, later))
    for each in (*waited, later):
        each.leaves.set()
        await each.task


async def test_gate_that_closes_again_before_those_who_waited_have_run_holds_them_back() -> None:
    """A takeover that was refused, and the next one at once: a call must not slip in between and write."""
    gate = Gate()
    gate.close()
    waited = Caller(gate)
    await _settle()
    gate.reopen()
    gate.close()
    await _settle()
    assert not waited.inside.is_set()
    assert await _ends(gate.idle())
    gate.reopen()
    await _settle()
    assert waited.inside.is_set()
    waited.leaves.set()
    await waited.task


async def test_call_that_began_before_the_gate_closed_counts_until_it_ends_across_a_reopening() -> (
    None
):
    gate = Gate()
    first = Caller(gate)
    await _settle()
    gate.close()
    gate.reopen()
    second = Caller(gate)
    await _settle()
    gate.close()
    first.leaves.set()
    await first.task
    assert not await _ends(gate.idle())
    second.leaves.set()
    await second.task
    assert await _ends(gate.idle())


async def test_caller_that_gives_up_while_it_waits_is_not_counted_after_the_reopening() -> None:
    gate = Gate()
    gate.close()
    waited = Caller(gate)
    await _settle()
    waited.task.cancel()
    await asyncio.wait([waited.task])
    gate.reopen()
    await _settle()
    assert not waited.inside.is_set()
    assert await _ends(gate.idle())


async def test_reopened_gate_leads_to_a_successor_once_there_is_one() -> None:
    gate = Gate()
    gate.close()
    gate.reopen()
    gate.close()
    waited = Caller(gate)
    await _settle()
    async with grpc.aio.insecure_channel("unix:/nowhere") as successor:
        gate.forward_to(successor)
        later = Caller(gate)
        await _settle()
        assert waited.answered_by is successor
        assert later.answered_by is successor
        assert await _ends(gate.idle()), "what the successor answers is no call of ours"
        for each in (waited, later):
            each.leaves.set()
            await each.task


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        ("/csi.v1.Node/NodePublishVolume", True),
        ("/csi.v1.Node/NodeGetCapabilities", False),
        ("/csi.v1.Identity/Probe", False),
        ("/crust.v1.HandlerRegistry/Register", True),
    ],
)
def test_gate_holds_back_what_needs_the_state(method: str, *, needs: bool) -> None:
    assert needs_state(method) is needs
