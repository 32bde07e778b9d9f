"""The events of the proxy's table."""

from crust.proxy.table import Event, Events


async def test_event_is_one_printable_line() -> None:
    events = Events()
    async with events.watch() as watched:
        events.emit(Event("claimed", message="sandbox a\x1b[2J\nready kata\x9b\u202e"))
        assert (await anext(watched)).message == r"sandbox a\x1b[2J\nready kata\x9b\u202e"
