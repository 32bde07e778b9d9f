"""Freezing a filesystem, and a watchdog that thaws it in time even if the caller has died.

A freeze has its own lock beside the volume's lock. An operation that changes the filesystem (grow, fsGroup) keeps the
volume's lock while it waits for the thaw. It waits in user space (`VolumeFreeze.changing`) and not in the kernel: a
thread that waits in the kernel cannot be killed, so a dying agent would never exit and PID 1 would start no new one.

The watchdog starts before the freeze, so no filesystem is ever frozen without one, and its time counts from there.
Dirty pages are flushed before that, while the writers still run, because FIFREEZE blocks them before it flushes. If
FIFREEZE takes longer than the time limit, the filesystem is thawed at once and the freeze fails.

The watchdogs of an agent end with it; the next agent thaws every mounted volume when it starts (volumes.py).
"""

from __future__ import annotations

import contextlib
import threading
import time

from . import filesystems, protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_RETRY_S = 1.0
"""The watchdog retries a failed thaw after this."""

_CHANGE_TIMEOUT_S = 30.0
"""How long a freeze waits for an operation that is changing the filesystem."""


class VolumeFreeze:
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
        self._callers = threading.Lock()
        self._changing = 0
        self._freezing = False

    @contextlib.contextmanager
    def serialized(self) -> Iterator[None]:
        """Hold the lock for one freeze or thaw request; a thaw waits for a freeze that is itself waiting."""
        with self._callers, self.lock:
            yield

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Wait for the thaw, and hold off freezes while the block changes the filesystem. Takes the lock itself.

        A freeze that waits goes first: fsGroup comes here again and again.
        """
        with self.lock:
            self.lock.wait_for(lambda: self._watchdog is None and not self._freezing)
            self._changing += 1
        try:
            yield
        finally:
            with self.lock:
                self._changing -= 1
                self.lock.notify_all()

    def wait_for_change(self) -> None:
        """Before a freeze: wait until nothing changes the filesystem; releases the lock meanwhile. Faults: busy."""
        self._freezing = True
        try:
            ended = self.lock.wait_for(lambda: not self._changing, _CHANGE_TIMEOUT_S)
        finally:
            self._freezing = False
            self.lock.notify_all()
        if not ended:
            raise protocol.Fault("busy", "the filesystem is being changed", "try again")

    def freeze(self, path: str, thaw_after_s: float) -> None:
        """Flush and block all writers; if frozen already, restart the time limit. Faults: timeout."""
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
                f"freezing the filesystem took longer than {thaw_after_s:g} s; it was thawed",
                "allow more time, or freeze it when less is written to it",
            )

    def thaw(self, path: str) -> bool:
        """Thaw and stop the watchdog; returns whether the filesystem was frozen until now."""
        was_frozen = filesystems.thaw(path)
        self._stop_watchdog()
        return was_frozen

    def _watch(self, path: str, thaw_after_s: float) -> None:
        watchdog = self._timer(thaw_after_s, lambda: self._on_timeout(path, watchdog))
        watchdog.daemon = True
        watchdog.start()
        self._stop_watchdog()
        self._watchdog = watchdog

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
            self.lock.notify_all()

    def _on_timeout(self, path: str, watchdog: threading.Timer) -> None:
        with self.lock:
            # It may have fired and waited for the lock while a new freeze started a new watchdog.
            if self._watchdog is not watchdog:
                return
            try:
                self.thaw(path)
            except FileNotFoundError:  # unmounted, which thaws
                self._stop_watchdog()
            except OSError:
                self._watch(path, _RETRY_S)
