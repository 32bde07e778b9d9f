"""Events for watchers: distributes each event to all watchers and never waits for one.

Each watcher has a bounded queue. If the queue is full, events for that watcher are dropped and counted, and the
watcher gets the count. A message may be another program's text: what looks like a credential in it is hidden from
watchers. Nothing depends on events: the handoff directory is the truth.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from crust.core import credentials

QUEUE_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Event:
    """An event. `kind` is a value of crust.v1.Event.kind; `time_s` is Unix time."""

    kind: str
    target_path: str = ""
    handler: str = ""
    message: str = ""
    time_s: float = field(default_factory=time.time)


class Events:
    """Distributes events to watchers."""

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Queue[Event], int] = {}

    def emit(self, event: Event) -> None:
        """Put `event` into the queue of every watcher, unless the queue is full."""
        for queue in self._watchers:
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._watchers[queue] += 1

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Callable[[asyncio.Event], AsyncIterator[Event]]]:
        """Start to watch. Call the result with an `asyncio.Event` that ends the stream."""
        queue: asyncio.Queue[Event] = asyncio.Queue(QUEUE_LENGTH)
        self._watchers[queue] = 0
        try:
            yield lambda stopping: self._events(queue, stopping)
        finally:
            del self._watchers[queue]

    async def _events(
        self, queue: asyncio.Queue[Event], stopping: asyncio.Event
    ) -> AsyncIterator[Event]:
        stop = asyncio.ensure_future(stopping.wait())
        get: asyncio.Future[Event] | None = None
        try:
            while True:
                get = asyncio.ensure_future(queue.get())
                await asyncio.wait((get, stop), return_when=asyncio.FIRST_COMPLETED)
                if not get.done():
                    return
                event = get.result()
                yield replace(event, message=credentials.shown(event.message))
                if queue.empty() and self._watchers[queue]:
                    missed, self._watchers[queue] = self._watchers[queue], 0
                    yield Event(
                        "missed", message=f"{missed} events were dropped: the reader is too slow"
                    )
        finally:  # the watcher may leave while it waits
            stop.cancel()
            if get is not None:
                get.cancel()
