"""Events for watchers: distributes each event to all watchers and never waits for one.

Each watcher has a bounded queue. If the queue is full, events for that watcher are dropped and counted, and the
watcher gets the count. A message may be another program's text: what looks like a credential in it is hidden from
watchers. Nothing depends on events: the handoff directory is the truth.
"""

import asyncio
import time
from collections.abc import AsyncIterator
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
        self._watchers: dict[asyncio.Queue[Event | None], int] = {}
        self._ended = False

    def emit(self, event: Event) -> None:
        """Put `event` into the queue of every watcher, unless the queue is full."""
        for queue in self._watchers:
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._watchers[queue] += 1

    def end(self) -> None:
        """End every watch, and those that begin from now on."""
        self._ended = True
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[Event]]:
        """The events while the block runs."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue(QUEUE_LENGTH)
        self._watchers[queue] = 0
        try:
            yield self._events(queue)
        finally:
            del self._watchers[queue]

    async def _events(self, queue: asyncio.Queue[Event | None]) -> AsyncIterator[Event]:
        while not self._ended and (event := await queue.get()) is not None:
            yield replace(event, message=credentials.shown(event.message))
            if queue.empty() and self._watchers[queue]:
                missed, self._watchers[queue] = self._watchers[queue], 0
                yield Event(
                    "missed", message=f"{missed} events were dropped: the reader is too slow"
                )
