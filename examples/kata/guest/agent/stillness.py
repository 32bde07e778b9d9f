"""Frozen filesystems, and their thaw in time, whoever has died.

A freeze has a lock of its own, beside the volume's: what changes a volume (growth, fsGroup) holds the volume's while
it waits for the thaw. It waits here and not in the kernel (`Still.moving`), because a thread that waits there cannot
be killed: the process of an agent that dies would not end, so no other agent would be started, which thaws.

The watchdog is started before the filesystem is frozen, so that none is frozen without one, and counts from there.
What is dirty is flushed before that, while the writers still go on: FIFREEZE holds them before it flushes. A kernel
that needs longer than the time limit has held its writers too long: it is thawed at once, and the freeze has failed.

An agent that dies takes its watchdogs along; the next one thaws all that it finds (volumes.py).
"""

from __future__ import annotations

import contextlib
import threading
import time

from . import filesystems, protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_AGAIN_S = 1.0
"""A thaw that failed is tried again after this."""

_CHANGES_S = 30.0
"""How long a freeze waits for what changes the filesystem at that moment."""


class Still:
    """The freeze of one volume. `lock` is to be held for each call."""

    def __init__(
        self,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.Condition(threading.Lock())
        self._timer = timer
        self._clock = clock
        self._watchdog: threading.Timer | None = None
        self._turn = threading.Lock()
        self._moves = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The lock, for a caller's freeze or thaw: a thaw waits for a freeze that gives the lock up meanwhile."""
        with self._turn, self.lock:
            yield

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Wait for the thaw, and keep freezes away while the block changes the filesystem. Takes the lock itself."""
        with self.lock:
            self.lock.wait_for(lambda: self._watchdog is None)
            self._moves = True
        try:
            yield
        finally:
            with self.lock:
                self._moves = False
                self.lock.notify_all()

    def wait_until_unmoved(self) -> None:
        """Before a freeze: let what changes the filesystem end. Gives the lock up meanwhile. Faults: busy."""
        if not self.lock.wait_for(lambda: not self._moves, _CHANGES_S):
            raise protocol.Fault("busy", "the filesystem is being changed", "try again")

    def freeze(self, path: str, thaw_after_s: float) -> None:
        """Flush and hold all writers; frozen already is success, and the time begins anew. Faults: timeout."""
        if self._watchdog is None:
            filesystems.flush(path)
        ends_s = self._clock() + thaw_after_s
        self._watch(path, thaw_after_s)
        try:
            filesystems.freeze(path)
        except OSError:
            with contextlib.suppress(OSError):  # then the watchdog tries again
                self.thaw(path)
            raise
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
            self.lock.notify_all()

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
