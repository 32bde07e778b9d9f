"""Turns: at most so many at once, for callers in several event loops.

asyncio's semaphore belongs to one loop, and threading's blocks the thread of one. Those that wait get their turn in
the order in which they came.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager


class Turns:
    """At most `at_once` blocks of `taking` run at the same time, in all threads of this process."""

    def __init__(self, at_once: int) -> None:
        self._guard = threading.Lock()
        self._free = at_once
        self._waiting: deque[Future[None]] = deque()

    @asynccontextmanager
    async def taking(self) -> AsyncIterator[None]:
        """Wait for a turn, and have it in the block. A caller that is cancelled leaves the queue."""
        turn: Future[None] = Future()
        with self._guard:
            if self._free:
                self._free -= 1
                turn.set_result(None)
            else:
                self._waiting.append(turn)
        try:
            await asyncio.wrap_future(turn)
            yield
        finally:
            if not turn.cancel():  # it was given
                self._give_back()

    def _give_back(self) -> None:
        with self._guard:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1
