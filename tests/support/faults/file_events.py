"""Waits for what another process writes, by inotify: no sleep between two looks."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from watchdog import events
from watchdog.observers import Observer


class _Changes(events.FileSystemEventHandler):
    def __init__(self, changed: threading.Event) -> None:
        self._changed = changed

    def on_any_event(self, event: events.FileSystemEvent) -> None:
        self._changed.set()


def wait_until(directory: Path, condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """Look after each change in the directory; returns whether the condition came true in time."""
    changed = threading.Event()
    observer = Observer()
    observer.schedule(_Changes(changed), str(directory))
    observer.start()
    try:
        until_s = time.monotonic() + timeout_s
        while not condition():  # after the watch began, so that no change is missed
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not changed.wait(left_s):
                return condition()
            changed.clear()
        return True
    finally:
        observer.stop()
        observer.join()
