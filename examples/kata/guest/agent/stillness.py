"""Frozen filesystems, and their thaw in time, whoever has died.

A freeze has a lock of its own, beside the volume's. Whatever changes a volume (growth, fsGroup) waits in the kernel
for the thaw, and holds the volume's lock meanwhile: a thaw that needed that lock would never come.

The watchdog is started before the filesystem is frozen, so that none is frozen without one, and counts from there.
What is dirty is flushed before that, while the writers still go on: FIFREEZE holds them before it flushes. A kernel
that needs longer than the time limit has held its writers too long: it is thawed at once, and the freeze has failed.

An agent that dies takes its watchdogs along; the next one thaws all that it finds (volumes.py).
"""

from __future__ import annotations

import threading
import time

from . import filesystems, protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_AGAIN_S = 1.0
"""A thaw that failed is tried again after this."""


class Still:
    """The freeze of one volume. `lock` is to be held for each call."""

    def __init__(
        self,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self._timer = timer
        self._clock = clock
        self._watchdog: threading.Timer | None = None

    def freeze(self, path: str, thaw_after_s: float) -> None:
        """Flush and hold all writers; frozen already is success, and the time begins anew. Faults: timeout."""
        if self._watchdog is None:
            filesystems.flush(path)
        ends_s = self._clock() + thaw_after_s
        self._watch(path, thaw_after_s)
        filesystems.freeze(path)
        if self._clock() >= ends_s:
            self.thaw(path)
            raise protocol.Fault(
                "timeout",
                f"the filesystem needed longer than {thaw_after_s:g} s to stand still; it was thawed",
                "give it more time, or freeze it when less is written to it",
            )

    def thaw(self, path: str) -> bool:
        """Let the writers go on; returns whether they were held until now. The watchdog goes when that is done."""
        was_frozen = filesystems.thaw(path)
        self._stop_watchdog()
        return was_frozen

    def _watch(self, path: str, thaw_after_s: float) -> None:
        watchdog = self._timer(thaw_after_s, lambda: self._thaw_late(path, watchdog))
        watchdog.daemon = True
        watchdog.start()
        self._stop_watchdog()
        self._watchdog = watchdog

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _thaw_late(self, path: str, watchdog: threading.Timer) -> None:
        with self.lock:
            # It may have fired and waited here, while a new freeze began a new time.
            if self._watchdog is not watchdog:
                return
            try:
                self.thaw(path)
            except FileNotFoundError:  # unmounted, which thaws
                self._stop_watchdog()
            except OSError:
                self._watch(path, _AGAIN_S)
