"""Distribution of events: nothing waits for a slow watcher, and it gets the number of dropped events."""

import asyncio

from crust.proxy.events import QUEUE_LENGTH, Event, Events


async def test_watcher_that_leaves_leaves_no_task() -> None:
    events, before = Events(), asyncio.all_tasks()
    for _ in range(5):
        async with events.watch() as watch:
            heard = watch(asyncio.Event())
            waiting = asyncio.ensure_future(anext(heard))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await heard.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_every_watcher_gets_all_events_since_its_start() -> None:
    events, stopping = Events(), asyncio.Event()
    events.emit(Event("before"))
    async with events.watch() as one, events.watch() as two:
        streams = one(stopping), two(stopping)
        events.emit(Event("first"))
        events.emit(Event("second"))
        for stream in streams:
            assert [(await anext(stream)).kind for _ in range(2)] == ["first", "second"]
            await stream.aclose()  # type: ignore[attr-defined]


async def test_slow_watcher_gets_the_number_of_dropped_events() -> None:
    events, stopping = Events(), asyncio.Event()
    async with events.watch() as watch:
        for number in range(QUEUE_LENGTH + 5):
            events.emit(Event(f"k{number}"))
        stopping_soon = watch(stopping)
        heard = [await anext(stopping_soon) for _ in range(QUEUE_LENGTH + 1)]
        assert heard[-1].kind == "missed"
        assert heard[-1].message.startswith("5 events")
        stopping.set()
        assert [each async for each in stopping_soon] == []


async def test_a_stop_ends_a_watch_that_waits() -> None:
    events, stopping = Events(), asyncio.Event()
    async with events.watch() as watch:
        waiting = asyncio.create_task(_all(watch(stopping)))
        await asyncio.sleep(0)
        stopping.set()
        assert await waiting == []


async def _all(stream: object) -> list[Event]:
    return [each async for each in stream]  # type: ignore[attr-defined]
