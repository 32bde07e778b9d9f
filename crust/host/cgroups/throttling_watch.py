"""Tells of new groups below a group: something was made there, or a while has passed; look again.

An event is only a hint, and hints coalesce. If the kernel gives no events (no inotify instance is left), the while
that passes is all there is.
"""

import logging
import threading
from collections.abc import Callable

from watchdog import events
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from crust import errors

FLOOR_S = 5.0
"""How long a group may go without its lines if its making raised no event."""

_log = logging.getLogger(__name__)


class GroupWatch:
    """Calls `look` in a thread of its own, until `stop`."""

    def __init__(self, group: str, look: Callable[[], None], *, floor_s: float = FLOOR_S) -> None:
        self._look = look
        self._floor_s = floor_s
        self._hint = threading.Event()
        self._ending = False
        self._observer = self._observe(group)
        self._thread = threading.Thread(target=self._run, name=f"groups below {group}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; returns when it has ended."""
        self._ending = True
        self._hint.set()
        self._thread.join()
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()

    def _observe(self, group: str) -> BaseObserver | None:
        observer = Observer()
        try:
            observer.schedule(
                _Hint(self._hint),
                group,
                recursive=True,
                event_filter=[events.DirCreatedEvent],
            )
            observer.start()
        except OSError as err:
            _log.warning("new groups are seen late", extra={"group": group, "error": err})
            return None
        return observer

    def _run(self) -> None:
        while not self._ending:
            self._hint.wait(self._floor_s)
            self._hint.clear()
            if self._ending:
                return
            try:
                self._look()
            except (OSError, errors.CrustError) as err:
                _log.error("a new group has no I/O limits yet", extra={"error": err})


class _Hint(events.FileSystemEventHandler):
    def __init__(self, hint: threading.Event) -> None:
        self._hint = hint

    def on_any_event(self, event: events.FileSystemEvent) -> None:
        self._hint.set()
