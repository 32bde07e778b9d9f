"""Watching the directory: an event means "look again", and nothing more; the truth is what a scan finds.

`Watch` yields a hint at the start, at each event, at least every `rescan_s` seconds, and when watchdog reports that
the kernel's queue overflowed (it only logs that, so its log is listened to). Hints coalesce: a slow reader gets one
for any number of events. `changes` turns hints into differences of scans.

Only the root is watched, not the entries: one inotify watch whatever the number of volumes. Entries come and go by
rename in the root, and whoever changes something inside an entry touches its directory, which the root's watch sees.
What no writer can announce, a sandbox that died, is seen at the next floor. A recursive watch is refused on purpose:
watchdog walks the tree anew after an overflow, and with many entries never gets to an end.

The root may be deleted and made again: each hint compares the directory that is watched with the one that is there.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from watchdog import events as watchdog_events
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

from crust.handoff import layout
from crust.handoff.entry import Entry
from crust.handoff.store import Store

_log = logging.getLogger(__name__)

RESCAN_S = 5.0
"""How long a change that raised no event may stay unseen: a scan of 1,000 entries takes a tenth of a second."""

_Kinds = list[type[watchdog_events.FileSystemEvent]]

_TOUCHES: _Kinds = [
    watchdog_events.DirDeletedEvent,
    watchdog_events.DirAttribEvent,
    # For its mask, which has attribute changes. That of DirModifiedEvent has them too, and then watchdog puts
    # one such event of the root beside each other event.
    watchdog_events.FileModifiedEvent,
]
"""What runtimes cause, and the end of the root."""

_EVENTS: _Kinds = [
    *_TOUCHES,
    watchdog_events.FileMovedEvent,
    watchdog_events.FileDeletedEvent,
    watchdog_events.DirMovedEvent,
]
"""No events of opening and closing: a scan itself would raise them, and so never come to rest."""


class Watch:
    """Hints that something in the directory `root` may have changed. An async context manager and iterator.

    `touches_only` is for the one who publishes: it knows of the entries that it moves in and out, and watchdog's work
    for each of these events would be in the way of the next step. Others' renames it sees at the floor.
    """

    def __init__(
        self, root: str, *, rescan_s: float = RESCAN_S, touches_only: bool = False
    ) -> None:
        self.root = root
        self._rescan_s = rescan_s
        self._events = _TOUCHES if touches_only else _EVENTS
        self._hint = asyncio.Event()
        self._observer: BaseObserver | None = None
        self._watched: tuple[ObservedWatch, tuple[int, int]] | None = None
        self._root_deleted = False
        self._overflow = _Overflow(self)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        logging.getLogger("watchdog").addHandler(self._overflow)
        await asyncio.to_thread(self._start)
        self._hint.set()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logging.getLogger("watchdog").removeHandler(self._overflow)
        self._loop = None
        await asyncio.to_thread(self._stop)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> None:
        """Return when it is time to look: at once if anything happened since the last time."""
        try:
            async with asyncio.timeout(self._rescan_s):
                await self._hint.wait()
        except TimeoutError:
            pass
        # Cleared before the caller looks: what happens while it looks sets it again.
        self._hint.clear()
        await asyncio.to_thread(self._follow_root)

    def root_deleted(self) -> None:
        """Cause a hint, and a new watch: the next root may well get the deleted one's inode number."""
        self._root_deleted = True
        self.notify()

    def notify(self) -> None:
        """Cause a hint. Any thread may call it."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._hint.set)
        except RuntimeError:  # the loop closed between two lines: there is nobody left to tell
            return

    def _start(self) -> None:
        observer = Observer()
        observer.start()
        self._observer = observer
        self._follow_root()

    def _stop(self) -> None:
        observer, self._observer, self._watched = self._observer, None, None
        if observer is not None:
            observer.stop()
            observer.join()

    def _follow_root(self) -> None:
        """Watch the directory that is at the root's path now, if it is not the one that is watched."""
        if self._observer is None:
            return
        there = _identity(self.root)
        if self._watched is not None:
            watch, watched = self._watched
            if watched == there and not self._root_deleted:
                return
            self._root_deleted = False
            self._observer.unschedule(watch)
            self._watched = None
        if there is not None:
            self._schedule(self._observer, there)

    def _schedule(self, observer: BaseObserver, identity: tuple[int, int]) -> None:
        try:
            watch = observer.schedule(
                _Bridge(self), self.root, recursive=False, event_filter=self._events
            )
        except OSError as err:
            # It went again, or inotify's limits are used up: the floor still finds everything, later.
            _log.warning("cannot watch the directory", extra={"root": self.root, "error": str(err)})
            return
        self._watched = (watch, identity)


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between two looks, and all that is there now. The first look's entries have all appeared."""

    entries: tuple[Entry, ...]
    appeared: tuple[Entry, ...]
    changed: tuple[Entry, ...]
    gone: tuple[Entry, ...]
    """As they were when they were last seen."""


async def changes(watch: Watch) -> AsyncIterator[Change]:
    """What is different, whenever something is; first, and always, what is there at the start.

    An entry that was withdrawn and published again between two looks has changed (its record has).
    """
    store = Store(watch.root)
    known: dict[str, Entry] | None = None
    async for _ in watch:
        entries = await asyncio.to_thread(store.scan)
        now = {entry.digest: entry for entry in entries}
        change = _compare(known or {}, now)
        if known is None or change.appeared or change.changed or change.gone:
            yield change
        known = now


def _compare(before: dict[str, Entry], now: dict[str, Entry]) -> Change:
    return Change(
        entries=tuple(now.values()),
        appeared=tuple(entry for digest, entry in now.items() if digest not in before),
        changed=tuple(
            entry
            for digest, entry in now.items()
            if digest in before and _differs(before[digest], entry)
        ),
        gone=tuple(entry for digest, entry in before.items() if digest not in now),
    )


def _differs(before: Entry, now: Entry) -> bool:
    return _comparable(before) != _comparable(now)


def _comparable(entry: Entry) -> tuple[object, ...]:
    """An entry without the identity of its errors: two scans raise two equal ones."""
    return (entry.record, str(entry.error), entry.claim, str(entry.claim_error), entry.unknown)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class _Bridge(watchdog_events.FileSystemEventHandler):
    """From watchdog's thread to the loop; what only concerns invisible names is left out."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_any_event(self, event: watchdog_events.FileSystemEvent) -> None:
        """Pass a hint on."""
        if (
            isinstance(event, watchdog_events.DirDeletedEvent)
            and event.src_path == self._watch.root
        ):
            self._watch.root_deleted()
            return
        names = [
            os.path.basename(os.fsdecode(each))
            for each in (event.src_path, event.dest_path)
            if each
        ]
        if not all(map(layout.is_hidden, names)):
            self._watch.notify()


class _Overflow(logging.Handler):
    """Takes any complaint of watchdog for the loss of events."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.WARNING)
        self._watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a hint on; the message is logged by whoever else listens."""
        self._watch.notify()
