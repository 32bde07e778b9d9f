"""The threads of a program, or of an engine, on which its blocking calls run.

A system call that hangs keeps its thread until the kernel lets it go: nothing in this process can end it. So each
part of a process has threads of its own, their number is bounded, and new work asks first whether one can be had
(`check_free`). The threads are daemons: a process ends while one of them hangs. How long a caller waits is not
decided here: an operation or a look has one thread at a time, keeps its key while that one hangs, and tells its
callers so (`crust.core.operations`).

The pool of a call belongs to the operation, not to the function: code below calls `run`, and gets a thread of the
pool that is `used` around it. Nothing uses the event loop's own threads (asyncio.to_thread), which nobody watches;
tests/unit/host/process/test_workers.py holds it. Work that takes long by its nature (copies, fsGroup) holds one of a
few places (`long_work`), or many at once would look like a pool in which everything hangs.

`concurrent.futures` lets its idle threads wait on one lock, so each call wakes a second thread, which finds nothing
and takes the interpreter's lock away from the first; its futures belong to no event loop, and each is copied into one
that does. Here each idle thread waits on a lock of its own, the last one that became idle is taken first, and a
result goes straight to the loop: 24 us a hop instead of 35 to 79, of which a publish makes several.
"""

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from crust.core import errors

P = ParamSpec("P")
T = TypeVar("T")

FREE_WITHIN_S = 1.0
"""How long a new operation, or a Probe, waits for a thread. Kubernetes' livenessprobe waits 3 s for the answer."""

_current: contextvars.ContextVar["Workers | None"] = contextvars.ContextVar("workers", default=None)


class NoWorkerFree(errors.PeerUnavailable):
    """All threads of an engine are taken, and none became free in time."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name} cannot take more work",
            why=why,
            hint="check the disks and mounts of its volumes, and the kernel log for calls that hang; retry",
        )
        self.name = name


@dataclass(frozen=True, slots=True)
class Load:
    """Of a pool: its limit, the threads that make a call, the calls that wait, those refused since the start."""

    limit: int
    busy: int
    waiting: int
    refused: int


class Workers:
    """A pool of at most `limit` threads, made when they are needed. `name` is shown."""

    def __init__(self, name: str, *, limit: int = 128) -> None:
        self.name = name
        self._limit = limit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = _Threads(limit)
        self._long_work = asyncio.Semaphore()
        self._refused = 0

    @property
    def load(self) -> Load:
        """How busy the pool is. Safe to read on any thread."""
        return Load(self._limit, self._threads.busy, len(self._threads.waiting), self._refused)

    def _here(self) -> "_Threads":
        """The threads of this loop. A new loop has new ones: those of an earlier one may have ended in a fork."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._threads.end()
            self._threads = _Threads(self._limit)
            self._long_work = asyncio.Semaphore(max(self._limit // 4, 1))
            weakref.finalize(self, self._threads.end)
        return self._threads

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` on a thread, when one is free. Raises what it raises; `NoWorkerFree` if none can be made.

        A caller that is cancelled leaves the call as it is: one that runs keeps its thread.
        """
        call = partial(contextvars.copy_context().run, function, *args, **kwargs)
        try:
            future = self._here().submit(call)
        except RuntimeError as error:  # "can't start new thread": the limit of the unit or pod
            why = "no thread can be started: the limit of its processes is reached"
            self._refused += 1
            raise NoWorkerFree(self.name, why) from error
        result: T = await future
        return result

    async def check_free(self) -> None:
        """Raise `NoWorkerFree` unless a thread is free, or becomes free soon."""
        if self._here().are_taken:
            await self.probe()

    async def probe(self) -> None:
        """Have a thread do nothing; raises `NoWorkerFree` if none can be had soon."""
        try:
            async with asyncio.timeout(FREE_WITHIN_S):
                await self.run(lambda: None)
        except TimeoutError as error:
            why = f"none of its {self._limit} threads became free within {FREE_WITHIN_S:g} s"
            self._refused += 1
            raise NoWorkerFree(self.name, why) from error

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Make this the pool of the calls inside the block, and of the tasks that are created in it."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextlib.asynccontextmanager
    async def long_work(self) -> AsyncIterator[None]:
        """Hold one of the places for long work, a quarter of the threads; waits for one."""
        self._here()
        async with self._long_work:
            yield


async def run(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` on a thread of the pool that is in use; outside of any, on one of the process."""
    return await (_current.get() or _of_process).run(function, *args, **kwargs)


async def check_free() -> None:
    """Raise `NoWorkerFree` unless the pool that is in use has a thread, or soon will."""
    await (_current.get() or _of_process).check_free()


@contextlib.asynccontextmanager
async def long_work() -> AsyncIterator[None]:
    """Hold a place for long work of the pool that is in use. Not inside another such block."""
    async with (_current.get() or _of_process).long_work():
        yield


@contextlib.asynccontextmanager
async def entered(blocking: contextlib.AbstractContextManager[T]) -> AsyncIterator[T]:
    """A block of a context manager whose beginning and end block: each is called on a thread.

    A block that is cancelled has no end: a call in it that runs on a thread goes on.
    """
    value = await run(blocking.__enter__)
    try:
        yield value
    except Exception as error:
        if not await run(blocking.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await run(blocking.__exit__, None, None, None)


class _Threads:
    """The threads of one pool and one loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._guard = threading.Lock()
        self._idle: list[_Thread] = []
        self._made = 0
        self.waiting: deque[_Call] = deque()
        self._ends = False

    @property
    def are_taken(self) -> bool:
        """Whether a call would have to wait for one."""
        return not self._idle and self._made >= self._limit

    @property
    def busy(self) -> int:
        """How many make a call now."""
        return self._made - len(self._idle)

    def submit(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call `function` on a thread, the longest waiting first."""
        loop = asyncio.get_running_loop()
        call = _Call(loop, loop.create_future(), function)
        with self._guard:
            if self._idle:
                self._idle.pop().give(call)
            elif self._made < self._limit:
                _Thread(self, call, f"hop-{self._made}")
                self._made += 1
            else:
                self.waiting.append(call)
        return call.future

    def end(self) -> None:
        """End the threads when their calls have ended."""
        with self._guard:
            self._ends = True
            self._made -= len(self._idle)
            while self._idle:
                self._idle.pop().give(None)

    def next(self, thread: "_Thread") -> "_Call | None":
        """What a thread that has ended a call does next; None: nothing that is known yet."""
        with self._guard:
            if self.waiting:
                return self.waiting.popleft()
            if self._ends:
                self._made -= 1
                thread.give(None)
            else:
                self._idle.append(thread)
        return None


@dataclass(frozen=True, slots=True)
class _Call:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    function: Callable[[], Any]

    def run(self) -> Callable[[], object]:
        """Call the function; returns how to tell the loop."""
        if self.future.cancelled():  # before it began
            return lambda: None
        try:
            return partial(self._post, self.future.set_result, self.function())
        except BaseException as error:  # whatever it is, the caller gets it, and the thread goes on
            return partial(self._post, self.future.set_exception, error)

    def _post(self, settle: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits it
            self.loop.call_soon_threadsafe(self._settle, settle, outcome)

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        if not self.future.done():  # the caller was cancelled
            settle(outcome)


class _Thread:
    def __init__(self, pool: _Threads, first: _Call, name: str) -> None:
        self._pool = pool
        self._given: _Call | None = first
        self._wake = threading.Lock()
        self._wake.acquire()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def give(self, call: _Call | None) -> None:
        """Wake an idle thread to make a call, or to end (None)."""
        self._given = call
        self._wake.release()

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


_of_process = Workers("this process", limit=64)
"""For a command, and for a daemon before its parts are started."""
