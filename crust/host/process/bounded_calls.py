"""System calls that may never return, such as statvfs(2) of a hung filesystem, with a deadline for each caller.

Each key has at most one call in flight, on a thread of its own. Later callers join it, and each waits no longer than
its own deadline, so a call that hangs blocks neither the event loop nor the thread pool. The number of threads is
bounded: a new key waits until one is free, and is refused at once when all of them hang. A thread cannot be killed: a
hung one ends with its system call or with the process.
"""

import asyncio
import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

from crust import errors

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

    def __init__(self, key: str, hanging: int, running: int) -> None:
        super().__init__(
            f"{key} was not called",
            why=f"all {running} threads for system calls are busy, and {hanging} of the calls hang",
            hint="check their devices and the kernel log",
        )
        self.key = key


class BoundedCalls:
    """Single-flight calls by key, used from one event loop. A key always has calls with results of one type."""

    def __init__(self, *, limit: int = 16) -> None:
        self._limit = limit
        self._flights: dict[Hashable, asyncio.Future[Any]] = {}
        self._hanging: set[Hashable] = set()

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
                self._hanging.add(key)
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

    def _too_many(self, shown: str) -> TooManyHungSystemCalls:
        return TooManyHungSystemCalls(shown, len(self._hanging), len(self._flights))

    def _start(self, key: Hashable, function: Callable[[], T], shown: str) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        flight: asyncio.Future[T] = loop.create_future()
        self._flights[key] = flight
        flight.add_done_callback(lambda done: self._land(key, done))
        threading.Thread(
            target=_run, args=(loop, flight, function), name=shown[:15], daemon=True
        ).start()
        return flight

    def _land(self, key: Hashable, flight: asyncio.Future[Any]) -> None:
        del self._flights[key]
        self._hanging.discard(key)
        if not flight.cancelled():
            flight.exception()  # retrieved, or asyncio logs it when no caller is left


def _run(
    loop: asyncio.AbstractEventLoop, flight: asyncio.Future[T], function: Callable[[], T]
) -> None:
    outcome = partial(flight.set_exception, _bug())
    try:
        outcome = partial(flight.set_result, function())
    except (errors.CrustError, OSError) as error:
        outcome = partial(flight.set_exception, error)
    finally:  # any other exception is a bug: the thread's excepthook logs it, and the callers still get an error
        _post(loop, outcome)


def _bug() -> errors.RuntimeFailed:
    return errors.RuntimeFailed("a call failed inside crust", hint="the log has the reason")


def _post(loop: asyncio.AbstractEventLoop, set_outcome: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(set_outcome)
    except RuntimeError:
        return  # the loop is closed: the process ends, and no caller waits
