"""A watch of the handoff directory: an event only means "scan again"; the result of the scan is the truth.

`Watch` yields a hint at the start, for each event, at least every `rescan_s` seconds, and when watchdog reports that
the kernel's event queue overflowed. (watchdog only logs the overflow, so `Watch` listens to its log.) Hints coalesce:
a slow reader gets one hint for any number of events.

Only the root is watched, not the entries: one inotify watch for any number of volumes. Entries appear and disappear
by a rename in the root; a writer of a file inside an entry touches the entry's directory, and the watch of the
root sees that. A sandbox that died causes no event; the next periodic scan finds it. There is no recursive watch, on
purpose: after an overflow watchdog walks the whole tree again, and with many entries it never finishes.

The root may be deleted and created again: each hint compares the watched directory with the one at the path.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Self

from watchdog import events as watchdog_events
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

from crust.handoff import layout
from crust.host.process import syscalls, workers

__all__ = ["Watch"]

_log = logging.getLogger(__name__)

RESCAN_S = 5.0
"""The time between scans without an event. The first scan of 1,000 entries takes a tenth of a second, a later one at
rest less than a hundredth.
"""

Kinds = tuple[type[watchdog_events.FileSystemEvent], ...]

TOUCHES: Kinds = (
    watchdog_events.DirDeletedEvent,
    watchdog_events.DirAttribEvent,
    # Its inotify mask includes attribute changes. So does that of DirModifiedEvent, but with that one watchdog adds
    # an event of the root to every other event.
    watchdog_events.FileModifiedEvent,
)
"""The events that runtimes cause, and the deletion of the root."""

RENAMES: Kinds = (
    watchdog_events.DirDeletedEvent,
    watchdog_events.FileMovedEvent,
    watchdog_events.FileDeletedEvent,
    watchdog_events.DirMovedEvent,
)
"""The events of entries that appear and disappear, and the deletion of the root. No event is one of opening and
closing: each scan would cause more of them, without end.
"""


class Watch(watchdog_events.FileSystemEventHandler, AsyncIterator[None]):
    """Hints that something in the directory `root` may have changed. An async context manager and iterator.

    `TOUCHES` alone are for the process that publishes: it knows the entries that it renames itself, and watchdog's
    work for each of these events would delay its next step. `RENAMES` alone are for a process that asks which volumes
    are published, and claims some of them itself. Each finds the other changes at the next periodic scan.
    """

    def __init__(
        self, root: str, *, rescan_s: float | None = None, kinds: Kinds = (*TOUCHES, *RENAMES)
    ) -> None:
        self.root = root
        self._rescan_s = RESCAN_S if rescan_s is None else rescan_s
        self._kinds = kinds
        self._hint = asyncio.Event()
        self._observer: BaseObserver | None = None
        self._watched: tuple[ObservedWatch, tuple[int, int]] | None = None
        self._root_deleted = False
        self._overflow = _OverflowListener(self)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        logger = logging.getLogger("watchdog")
        logger.setLevel(logging.WARNING)  # also where the settings log errors alone
        logger.addHandler(self._overflow)
        await workers.run(self._start)
        self._hint.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        logging.getLogger("watchdog").removeHandler(self._overflow)
        self._loop = None
        await workers.run(self._stop)

    async def __anext__(self) -> None:
        """Return when it is time to scan: at once if there was a hint since the last call."""
        timer = asyncio.get_running_loop().call_later(self._rescan_s, self._hint.set)
        try:
            await self._hint.wait()
        finally:
            timer.cancel()
        # Cleared before the caller scans: a change during the scan sets it again.
        self._hint.clear()
        await workers.run(self._follow_root)

    def on_any_event(self, event: watchdog_events.FileSystemEvent) -> None:
        """Cause a hint, unless all names of the event are hidden. watchdog calls it on its thread."""
        is_deletion = isinstance(event, watchdog_events.DirDeletedEvent)
        if is_deletion and event.src_path == self.root:
            # a new root may get the inode number of the deleted one
            self._root_deleted = True
            self.notify()
            return
        paths = [os.fsdecode(path) for path in (event.src_path, event.dest_path) if path]
        if not all(layout.is_hidden(os.path.basename(path)) for path in paths):
            self.notify()

    def notify(self) -> None:
        """Cause a hint. Thread-safe."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._hint.set)
        except RuntimeError:  # the loop was closed just now: no reader is left
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
        """Watch the directory that is now at the root's path, unless it is watched already."""
        if self._observer is None:
            return
        identity = None
        with syscalls.translating(f"cannot look at {self.root}"), suppress(FileNotFoundError):
            status = os.stat(self.root)
            identity = status.st_dev, status.st_ino
        if self._watched is not None:
            watch, watched = self._watched
            if watched == identity and not self._root_deleted:
                return
            self._root_deleted = False
            self._observer.unschedule(watch)
            self._watched = None
        if identity is None:
            return
        try:
            watch = self._observer.schedule(
                self, self.root, recursive=False, event_filter=list(self._kinds)
            )
        except OSError as err:
            # The root was deleted again, or inotify's limits are reached. Periodic scans still find every change.
            _log.warning("cannot watch the directory", extra={"root": self.root, "error": err})
            return
        self._watched = (watch, identity)


class _OverflowListener(logging.Handler):
    """Treats every warning of watchdog as a loss of events."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.WARNING)
        self._watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        self._watch.notify()
