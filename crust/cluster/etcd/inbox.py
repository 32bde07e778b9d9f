"""Who waits for which answer, and which requests and answers nobody needs any more.

An answer that was read is deleted at once. One that nobody waits for, and a request whose caller has left, stay for a
while, so that the caller's retry finds them, also at the next leader; then they are deleted. So what is open is
bounded by what was asked in that time. A request that is asked again while it is being deleted waits for that.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

from crust import errors
from crust.cluster.etcd.mirror import RequestKey
from crust.cluster.protocol import Answer

KEEP_S = 60.0
"""A CO's sidecar repeats a call that failed after a second first, and then ever later."""


class Inbox:
    """The waiters of one controller."""

    def __init__(self, keep_s: float = KEEP_S, now: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._now = now
        self._waiting: dict[RequestKey, set[asyncio.Future[Answer]]] = {}
        self._read: set[RequestKey] = set()
        self._idle_since: dict[RequestKey, float] = {}
        self._deleting: frozenset[RequestKey] = frozenset()
        self._deleted = asyncio.Event()
        self.work = asyncio.Event()
        """Something can be deleted at once."""

    @contextlib.contextmanager
    def waiting(self, asking: RequestKey) -> Iterator["asyncio.Future[Answer]"]:
        """The answer, as soon as it is there."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiters = self._waiting.setdefault(asking, set())
        waiters.add(answered)
        try:
            yield answered
        finally:
            waiters.discard(answered)
            if not waiters:
                self._waiting.pop(asking, None)
            if answered.done() and not answered.cancelled():
                answered.exception()  # seen, also where the waiter left in the same moment

    async def settled(self, asking: RequestKey) -> None:
        """Wait until no answer that was read, or is being deleted, can be treated as a new one."""
        while asking in self._read or asking in self._deleting:
            await self._deleted.wait()

    def answer(self, asking: RequestKey, answer: Answer) -> None:
        """Give an answer to those who wait for it."""
        for waiter in self._waiting.get(asking, ()):
            if not waiter.done():
                waiter.set_result(answer)
                self._read.add(asking)
                self.work.set()

    def fail(self, error: errors.CrustError) -> None:
        """Nobody will be answered; who leads next begins again."""
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error)
        self._read.clear()
        self._idle_since.clear()
        self.deleted()

    def to_delete(self, open_now: Iterable[RequestKey], limit: int) -> frozenset[RequestKey]:
        """What nobody needs, at most `limit`; until `deleted` these count as being deleted."""
        now = self._now()
        idle = {
            each: self._idle_since.get(each, now) for each in open_now if each not in self._waiting
        }
        self._idle_since = idle
        old = (each for each, since in idle.items() if now - since >= self._keep_s)
        due = [*(each for each in self._read if each not in self._waiting), *old]
        self._deleting = frozenset(due[:limit])
        self.work.clear()
        return self._deleting

    def deleted(self) -> None:
        """They are gone, for the mirror too."""
        self._read -= self._deleting
        self._deleting = frozenset()
        self._deleted.set()
        self._deleted = asyncio.Event()
