"""How much of the daemon one guest may use with its messages, per connection.

One event loop serves all sandboxes of a node, so a guest that writes without end would take the time of the others.
Two limits:

    pace         messages and bytes per second. Beyond it the client waits before it reads on, and the guest blocks on
                 its port. A container that prints one byte at a time is slowed down, and its sandbox lives.
    unsolicited  messages that answer no request and belong to no container of this connection. A guest that keeps to
                 the protocol sends few (answers that came too late), so beyond this limit it is hostile.
"""

import time
from collections.abc import Callable

MESSAGES_PER_S = 2000
BYTES_PER_S = 32 * 1024 * 1024
UNSOLICITED_PER_S = 10
UNSOLICITED_BYTES_PER_S = 64 * 1024
_BURST_S = 0.25
_UNSOLICITED_BURST_S = 16


class _Bucket:
    """A token bucket that may be overdrawn: `debt_s` is the time until it is filled to zero again."""

    def __init__(self, per_s: float, burst_s: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._most = per_s * burst_s
        self._clock = clock
        self._left = self._most
        self._filled_s = clock()

    def take(self, amount: float) -> None:
        """Take `amount`, more than there is if need be."""
        now_s = self._clock()
        refilled = self._left + (now_s - self._filled_s) * self._per_s
        self._left = min(self._most, refilled) - amount
        self._filled_s = now_s

    @property
    def debt_s(self) -> float:
        """Seconds until it is no longer overdrawn; 0 if it is not."""
        return max(0.0, -self._left / self._per_s)


class MessageBudget:
    """The budget of one connection."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace = (
            _Bucket(MESSAGES_PER_S, _BURST_S, clock),
            _Bucket(BYTES_PER_S, _BURST_S, clock),
        )
        self._unsolicited = (
            _Bucket(UNSOLICITED_PER_S, _UNSOLICITED_BURST_S, clock),
            _Bucket(UNSOLICITED_BYTES_PER_S, _UNSOLICITED_BURST_S, clock),
        )

    def spend(self, messages: int, size_bytes: int) -> float:
        """Account for read messages and bytes; returns the seconds to wait before more is read."""
        for bucket, amount in zip(self._pace, (messages, size_bytes), strict=True):
            bucket.take(amount)
        return max(bucket.debt_s for bucket in self._pace)

    def accepts_unsolicited(self, size_bytes: int) -> bool:
        """Account for one unsolicited message; False if the guest sent too many."""
        for bucket, amount in zip(self._unsolicited, (1, size_bytes), strict=True):
            bucket.take(amount)
        return all(bucket.debt_s == 0 for bucket in self._unsolicited)
