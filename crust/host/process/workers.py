"""The threads on which an engine's blocking calls run: a pool of its own, with a limit, and a way to ask for one.

A system call that hangs keeps its thread until the kernel lets it go: nothing in this process can end it. So threads
are not shared between engines, their number is bounded, and whoever starts something new asks first whether one can
be had (`check_free`). Who waits for a call, and for how long, is not decided here: an operation has one thread at a
time, keeps its key while that one hangs, and tells its callers so (`crust.operations`).

Which pool a call uses belongs to the operation, not to the function: code below calls `run`, as it would call
asyncio.to_thread, and gets a thread of the pool that is `used` around it. Work that takes long by its nature (copies,
fsGroup) holds one of a few places (`long_work`), or many at once would look like a pool in which everything hangs.
"""

import asyncio
import contextlib
import contextvars
import functools
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from crust import errors
from crust.host.process.threads import Threads

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
    """A pool of at most `limit` threads for each event loop that uses it. `name` is shown."""

    def __init__(self, name: str, *, limit: int = 128) -> None:
        self.name = name
        self._limit = limit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = Threads(limit, daemon=True)
        self._long_work = asyncio.Semaphore()
        self._refused = 0

    @property
    def load(self) -> "Load":
        """How busy the pool is. Safe to read on any thread."""
        return Load(self._limit, self._threads.busy, self._threads.waiting, self._refused)

    def _here(self) -> Threads:
        """The threads of this loop. A new loop has new ones: those of an earlier one may have ended in a fork."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._threads.shutdown(wait=False)
            self._threads = Threads(self._limit, daemon=True)
            self._long_work = asyncio.Semaphore(max(self._limit // 4, 1))
            weakref.finalize(self, self._threads.shutdown, wait=False)
        return self._threads

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` on a thread, when one is free. Raises what it raises; `NoWorkerFree` if none can be made.

        A caller that is cancelled leaves the call as it is: one that runs keeps its thread.
        """
        call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
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
    pool = _current.get()
    if pool is None:
        return await asyncio.to_thread(function, *args, **kwargs)
    return await pool.run(function, *args, **kwargs)


@contextlib.asynccontextmanager
async def long_work() -> AsyncIterator[None]:
    """Hold a place for long work of the pool that is in use. Not inside another such block."""
    pool = _current.get()
    if pool is None:
        yield
        return
    async with pool.long_work():
        yield
