"""System calls that may never return, such as statvfs(2) of a hung filesystem, with a deadline for each caller.

Each key has at most one call in flight, on a thread that has no other. Later callers join it, and each waits no
longer than its own deadline, so a call that hangs blocks neither the event loop nor the thread pool. The number of
threads is bounded: a new key waits until one is free, and is refused at once when all of them hang. A thread cannot
be killed: a hung one ends with its system call or with the process.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from crust import errors
from crust.host.process.threads import Threads

_log = logging.getLogger(__name__)

T = TypeVar("T")


class SystemCallTimedOut(errors.PeerUnavailable):
    """A system call has not returned in time."""

    def __init__(self, key: str, timeout_s: float) -> None:
        super().__init__(
            f"{key} does not answer",
            why=f"the system call has not returned within {timeout_s:g} s",
            hint="check the device and the kernel log; other volumes are not affected",
        )
        self.key = key
        self.timeout_s = timeout_s


class TooManyHungSystemCalls(errors.PeerUnavailable):
    """All threads for system calls are taken by calls that hang."""

    def __init__(self, key: str, hanging: Sequence[str], running: int) -> None:
        of = f", such as that of {hanging[0]}" if hanging else ""
        super().__init__(
            f"{key} was not called",
            why=f"all {running} threads for system calls are busy, and {len(hanging)} of the calls hang{of}",
            hint="check their devices and the kernel log",
        )
        self.key = key


class BoundedCalls:
    """Single-flight calls by key, used from one event loop. A key always has calls with results of one type."""

    def __init__(self, *, limit: int = 16) -> None:
        self._limit = limit
        self._threads = Threads(limit, daemon=True)
        weakref.finalize(self, self._threads.shutdown, wait=False)
        self._flights: dict[Hashable, asyncio.Future[Any]] = {}
        self._hanging: dict[Hashable, str] = {}
        """The keys whose calls a caller has waited for in vain, and how they are shown."""

    async def call(
        self,
        key: Hashable,
        function: Callable[[], T],
        *,
        timeout_s: float,
        shown: str = "",
        fresh: bool = False,
    ) -> T:
        """The result of `function`, or of the call of this key that is already running.

        `fresh`: not of one that began before this caller came, and may have missed what it has changed. `shown` is
        the key in messages. Raises `SystemCallTimedOut`, `TooManyHungSystemCalls`, and whatever `function` raises.
        """
        shown = shown or str(key)
        flight: asyncio.Future[T] | None = self._flights.get(key)
        try:
            async with asyncio.timeout(timeout_s):
                if fresh and flight is not None:
                    await asyncio.wait([flight])
                flight = await self._flight(key, function, shown)
                return await asyncio.shield(flight)
        except TimeoutError as err:
            if flight is None:
                raise self._too_many(shown) from err
            if not flight.done():
                self._hanging[key] = shown
            raise SystemCallTimedOut(shown, timeout_s) from err

    async def _flight(
        self, key: Hashable, function: Callable[[], T], shown: str
    ) -> asyncio.Future[T]:
        """The running call of this key, or a new one as soon as a thread is free."""
        while key not in self._flights and len(self._flights) >= self._limit:
            if len(self._hanging) >= self._limit:
                raise self._too_many(shown)
            await asyncio.wait(self._flights.values(), return_when=asyncio.FIRST_COMPLETED)
        return self._flights.get(key) or self._start(key, function, shown)

    def refusal(self, shown: str) -> TooManyHungSystemCalls | None:
        """What a call with a new key would raise now; None if it is made, or waits for one that may end."""
        return self._too_many(shown) if len(self._hanging) >= self._limit else None

    def _too_many(self, shown: str) -> TooManyHungSystemCalls:
        return TooManyHungSystemCalls(shown, [*self._hanging.values()], len(self._flights))

    def _start(self, key: Hashable, function: Callable[[], T], shown: str) -> asyncio.Future[T]:
        flight: asyncio.Future[T] = self._threads.submit(_run, shown, function)
        self._flights[key] = flight
        flight.add_done_callback(lambda done: self._land(key, done))
        return flight

    def _land(self, key: Hashable, flight: asyncio.Future[Any]) -> None:
        del self._flights[key]
        self._hanging.pop(key, None)
        if not flight.cancelled():
            flight.exception()  # retrieved, or asyncio logs it when no caller is left


def _run(shown: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except (errors.CrustError, OSError):
        raise
    except BaseException as bug:  # the callers get an error, and the log the reason
        _log.exception("a call of %s failed inside crust", shown)
        hint = "the log has the reason"
        raise errors.RuntimeFailed("a call failed inside crust", hint=hint) from bug
