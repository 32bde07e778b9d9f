"""The events of the proxy's table."""

import asyncio

import pytest

from crust.proxy.table import QUEUE_LENGTH, Event, Events


async def test_event_is_one_printable_line() -> None:
    events = Events()
    async with events.watch() as watched:
        events.emit(Event("claimed", message="sandbox a\x1b[2J\nready kata\x9b\u202e"))
        assert (await anext(watched)).message == r"sandbox a\x1b[2J\nready kata\x9b\u202e"


async def test_watcher_that_leaves_leaves_no_task() -> None:
    events, before = Events(), asyncio.all_tasks()
    for _ in range(5):
        async with events.watch() as watch:
            waiting = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await watch.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_every_watcher_gets_all_events_since_its_start() -> None:
    events = Events()
    events.emit(Event("before"))
    async with events.watch() as one, events.watch() as two:
        streams = one, two
        events.emit(Event("first"))
        events.emit(Event("second"))
        for stream in streams:
            assert [(await anext(stream)).kind for _ in range(2)] == ["first", "second"]
            await stream.aclose()  # type: ignore[attr-defined]


async def test_slow_watcher_gets_the_number_of_dropped_events() -> None:
    events = Events()
    async with events.watch() as watch:
        for number in range(QUEUE_LENGTH + 5):
            events.emit(Event(f"k{number}"))
        heard = [await anext(watch) for _ in range(QUEUE_LENGTH + 1)]
        assert heard[-1].kind == "missed"
        assert heard[-1].message.startswith("5 events")
        events.end()
        assert await _all(watch) == []


@pytest.mark.parametrize("waiting", [0, QUEUE_LENGTH])
async def test_end_of_events_ends_every_watch(waiting: int) -> None:
    events = Events()
    async with events.watch() as watch, events.watch() as later:
        heard = asyncio.create_task(_all(watch))
        await asyncio.sleep(0)
        for _ in range(waiting):
            events.emit(Event("k"))
        events.end()
        assert len(await heard) <= 1
        assert await _all(later) == []


async def _all(stream: object) -> list[Event]:
    return [answer async for answer in stream]  # type: ignore[attr-defined]
