"""The threads behind `asyncio.to_thread`: system calls that block run there, and a publish makes several such hops.

`concurrent.futures` lets its idle threads wait on one lock, so each call wakes a second thread, which finds nothing
and takes the interpreter's lock away from the first; its futures belong to no event loop, and each is copied into one
that does. Here each idle thread waits on a lock of its own, the last one that became idle is taken first, and a
result goes straight to the loop. What callers see is the same: a call that has begun runs to its end also if its
caller is cancelled, and a process does not end before its calls.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any


class Threads(ThreadPoolExecutor):
    """At most `limit` threads, made when they are needed. For `set_default_executor`, which takes no other class.

    The end of a process does not wait for those that are `daemon`.
    """

    def __init__(self, limit: int, *, daemon: bool = False) -> None:
        super().__init__(limit)  # makes no thread; its own methods are replaced
        self.daemon = daemon
        self._limit = limit
        self._guard = threading.Lock()
        self._idle: list[_Thread] = []
        self._all: list[_Thread] = []
        self._waiting: deque[_Call] = deque()
        self._ends = False

    def submit(  # type: ignore[override]
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> asyncio.Future[Any]:
        """Call `function` on a thread, the longest waiting first. For the event loop, which takes its own futures as
        they are.
        """
        loop = asyncio.get_running_loop()
        call = _Call(loop, loop.create_future(), partial(function, *args, **kwargs))
        with self._guard:
            if self._ends:
                raise RuntimeError("no thread is started for a process that ends")
            if self._idle:
                self._idle.pop().give(call)
            elif len(self._all) < self._limit:
                self._all.append(_Thread(self, call, f"hop-{len(self._all)}"))
            else:
                self._waiting.append(call)
        return call.future

    @property
    def are_taken(self) -> bool:
        """Whether a call would have to wait for one."""
        return not self._idle and len(self._all) >= self._limit

    @property
    def busy(self) -> int:
        """How many threads make a call now."""
        return len(self._all) - len(self._idle)

    @property
    def waiting(self) -> int:
        """How many calls wait for a thread."""
        return len(self._waiting)

    def shutdown(
        self,
        wait: bool = True,  # noqa: FBT001, FBT002 - the signature of concurrent.futures
        *,
        cancel_futures: bool = False,
    ) -> None:
        """End the threads when all calls have ended, those that wait included unless `cancel_futures` is set."""
        with self._guard:
            self._ends = True
            if cancel_futures:
                self._waiting.clear()
            while self._idle:
                self._idle.pop().give(None)
        for thread in self._all if wait else ():
            thread.join()

    def next(self, thread: "_Thread") -> "_Call | None":
        """What a thread that has ended a call does next; None: nothing that is known yet."""
        with self._guard:
            if self._waiting:
                return self._waiting.popleft()
            if self._ends:
                thread.give(None)
            else:
                self._idle.append(thread)
        return None


class _Call:
    """A function, and who awaits it."""

    __slots__ = ("_function", "_loop", "future")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
        function: Callable[[], Any],
    ) -> None:
        self._loop = loop
        self.future = future
        self._function = function

    def run(self) -> Callable[[], None]:
        """Call the function; returns how to tell the loop."""
        if self.future.cancelled():  # before it began
            return lambda: None
        try:
            result = self._function()
        except BaseException as error:  # whatever it is, the caller gets it, and the thread goes on
            return partial(self._post, self.future.set_exception, error)
        return partial(self._post, self.future.set_result, result)

    def _post(self, settle: Callable[[Any], None], outcome: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._settle, settle, outcome)
        except RuntimeError:  # the loop is closed: nobody awaits it
            return

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        if not self.future.done():  # the caller was cancelled
            settle(outcome)


class _Thread:
    def __init__(self, pool: Threads, first: _Call, name: str) -> None:
        self._pool = pool
        self._given: _Call | None = first
        self._wake = threading.Lock()
        self._wake.acquire()
        self._thread = threading.Thread(target=self._work, name=name, daemon=pool.daemon)
        self._thread.start()

    def give(self, call: _Call | None) -> None:
        """Wake an idle thread to make a call, or to end (None)."""
        self._given = call
        self._wake.release()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _work(self) -> None:
        call = self._take()
        while call is not None:
            tell = call.run()
            # idle before the loop is told: what the loop does next finds this thread, and starts no other
            call = self._pool.next(self)
            tell()
            del tell  # or the result would live until the next call
            if call is None:
                self._wake.acquire()
                call = self._take()

    def _take(self) -> _Call | None:
        call, self._given = self._given, None
        return call
