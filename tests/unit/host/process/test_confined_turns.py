"""Turns are given in order, in all event loops, and a caller that is cancelled keeps none."""

import asyncio
import threading

import pytest

from crust.host.process.confined import Turns

pytestmark = pytest.mark.usefixtures("strict_event_loop")


async def test_turns_are_given_in_the_order_of_the_callers() -> None:
    turns, order = Turns(2), list[str]()

    async def take(name: str) -> None:
        async with turns.taking():
            order.append(f"{name} in")
            await asyncio.sleep(0)
            order.append(f"{name} out")

    await asyncio.gather(*(take(name) for name in "abcd"))
    assert order[:2] == ["a in", "b in"]
    assert [event for event in order if "in" in event] == ["a in", "b in", "c in", "d in"]
    assert max(_inside(order)) == 2


def _inside(order: list[str]) -> list[int]:
    """How many have a turn after each event."""
    ins = [1 if event.endswith("in") else -1 for event in order]
    return [sum(ins[: count + 1]) for count in range(len(ins))]


async def test_cancelled_caller_leaves_the_queue_to_the_next() -> None:
    turns, entered = Turns(1), list[str]()

    async def take(name: str) -> None:
        async with turns.taking():
            entered.append(name)

    async with turns.taking():
        waiting = [asyncio.create_task(take(name)) for name in ("cancelled", "next")]
        await asyncio.sleep(0)
        waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert waiting[0].cancelled()
    assert entered == ["next"]


async def test_caller_cancelled_as_its_turn_comes_gives_it_back() -> None:
    turns = Turns(1)
    entered = asyncio.Event()

    async def take() -> None:
        async with turns.taking():
            entered.set()

    async with turns.taking():
        waiting = asyncio.create_task(take())
        await asyncio.sleep(0)
    waiting.cancel()  # the turn is given, and the caller has not run since
    await asyncio.gather(waiting, return_exceptions=True)
    assert not entered.is_set()
    await take()
    assert entered.is_set()


async def test_turn_of_another_event_loop_ends_the_wait() -> None:
    turns, entered, leave = Turns(1), threading.Event(), threading.Event()

    async def hold() -> None:
        async with turns.taking():
            entered.set()
            assert leave.wait(60)

    async def take() -> str:
        async with turns.taking():
            return "entered"

    other = threading.Thread(target=lambda: asyncio.run(hold()))
    other.start()
    assert entered.wait(60)
    waiting = asyncio.create_task(take())
    await asyncio.sleep(0)
    leave.set()
    assert await waiting == "entered"
    other.join()
