"""The threads of a program, or of an engine, on which its blocking calls run.

A system call that hangs keeps its thread until the kernel returns: nothing in this process can end it. So each part
of a process has a bounded number of threads of its own, and new work checks first that one is free (`check_free`).
The threads are daemons: a process ends while one of them hangs. `crust.core.operations` decides how long a caller
waits: an operation or a look has one thread at a time, and keeps its key while that thread hangs.

The pool of a call belongs to the operation, not to the function: code below calls `run`, and gets a thread of the
pool that is `used` around it. No code uses the event loop's own threads (asyncio.to_thread), which have no watch;
tests/unit/host/process/test_workers.py holds it. Work that takes long by its nature holds one of a few places of its
kind (`long_work`): without this limit it would look like a pool in which every call hangs, and with one limit for
all, fsGroup of large volumes would end the copies. Work whose length a tenant decides gives its place up between its
steps, and of these steps one runs at a time (`turn`): two would end no earlier, because one interpreter runs them,
and each of them delays all other calls.

`concurrent.futures` lets its idle threads wait on one lock, so each call wakes a second thread, which takes the
interpreter's lock away from the first; its futures belong to no event loop, and must be copied into futures of the
loop. Here each idle thread waits at a queue of its own, a call goes to the thread that became idle last, and its
result goes straight to the loop: 24 us a hop instead of 35 to 79, and a publish makes several hops.
"""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import enum
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeAlias, TypeVar

from crust.core import errors

P = ParamSpec("P")
T = TypeVar("T")

FREE_WITHIN_S = 1.0
"""How long a new operation, or a Probe, waits for a thread. Kubernetes' livenessprobe waits 3 s for the answer."""

TURN_S = 0.5
"""How long a step waits for its turn: then the present one hangs, or so many wait that all are slow."""

IDLE_S = 10.0
"""How long a thread without a call lives. A watch uses one more often, so a serving part keeps its last thread."""


class LongWork(enum.Enum):
    """The kinds of work that takes long by its nature. Each has a quarter of a pool's threads."""

    COPY = "the copy of a volume or snapshot"
    GROUP = "a step of the walk that gives a volume's files their group"


_current: contextvars.ContextVar["Workers | None"] = contextvars.ContextVar("workers", default=None)


class NoWorkerFree(errors.PeerUnavailable):
    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} cannot take more work", why=why)
        self.name = name


_Call: TypeAlias = "tuple[Callable[[], Any], asyncio.Future[Any]]"
"""A function, and the future of its caller."""


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # the caller was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class Workers:
    """A pool of at most `limit` threads, made when they are needed. `name` is shown."""

    def __init__(self, name: str, *, limit: int = 128) -> None:
        self.name = name
        self._limit = limit
        self.long_work = {kind: asyncio.Semaphore(max(limit // 4, 1)) for kind in LongWork}
        """The places for each kind, which callers get in the order in which they ask."""
        self.turns = asyncio.Semaphore(1)
        self._refused = 0
        self._begin()

    def _begin(self) -> None:
        """Have no threads: a forked process has none of its parent's."""
        self._process = os.getpid()
        self._guard = threading.Lock()
        self._made = 0
        self._idle: list[SimpleQueue[_Call]] = []
        """Where the threads without a call wait."""
        self._waiting: deque[_Call] = deque()

    @property
    def load(self) -> Mapping[str, int]:
        """The limit, the threads that make a call, the calls that wait, those refused since the start.

        Safe to read on any thread.
        """
        return {
            "limit": self._limit,
            "busy": self._made - len(self._idle),
            "waiting": len(self._waiting),
            "refused": self._refused,
        }

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` on a thread, when one is free. Raises its errors; `NoWorkerFree` if no thread can start.

        A cancelled caller ends no call that runs: the call keeps its thread. One that waits for a thread is dropped.
        """
        bound = partial(contextvars.copy_context().run, function, *args, **kwargs)
        call: _Call = (bound, asyncio.get_running_loop().create_future())
        if self._process != os.getpid():
            self._begin()
        with self._guard:
            if self._idle:
                self._idle.pop().put(call)
            elif self._made < self._limit:
                self._start(call)
            else:
                self._waiting.append(call)
        try:
            result: T = await call[1]
        finally:
            if call[1].cancelled():
                with self._guard, contextlib.suppress(ValueError):  # it has a thread, or had one
                    self._waiting.remove(call)
        return result

    def _start(self, call: _Call) -> None:
        queue: SimpleQueue[_Call] = SimpleQueue()
        queue.put(call)
        name = f"hop-{self._made}"
        try:
            threading.Thread(target=self._work, args=(queue,), name=name, daemon=True).start()
        except RuntimeError as error:  # "can't start new thread": the limit of the unit or pod
            why = "no thread can be started: the limit of its processes is reached"
            self._refused += 1
            raise NoWorkerFree(self.name, why) from error
        self._made += 1

    def _work(self, queue: "SimpleQueue[_Call]") -> None:
        """Make the calls in this thread's queue, until none comes for a while."""
        while True:
            try:
                function, future = queue.get(timeout=IDLE_S)
            except Empty:
                with self._guard:
                    if queue not in self._idle:
                        continue  # a call came in this moment
                    self._idle.remove(queue)
                    self._made -= 1
                return
            result, error = None, None
            try:
                if not future.cancelled():
                    result = function()
            except BaseException as raised:
                # the caller gets every error, and the thread goes on
                error = raised
            with self._guard:
                # before the loop gets the result: its next call then finds this thread, and starts no other
                if self._waiting:
                    queue.put(self._waiting.popleft())
                else:
                    self._idle.append(queue)
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller is left
                future.get_loop().call_soon_threadsafe(_settle, future, result, error)
            del function, future, result, error  # or the result would live until the next call

    async def check_free(self) -> None:
        """Raise `NoWorkerFree` unless a thread is free, or becomes free soon."""
        if not self._idle and self._made >= self._limit:
            await self.probe()

    async def probe(self) -> None:
        """Make an empty call; raises `NoWorkerFree` if no thread makes it soon."""
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


async def run(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` on a thread of the pool that is in use; outside of any, on one of the process."""
    return await (_current.get() or _process_workers).run(function, *args, **kwargs)


async def check_free() -> None:
    """Raise `NoWorkerFree` unless the pool that is in use has a thread, or soon will."""
    await (_current.get() or _process_workers).check_free()


def long_work(kind: LongWork) -> contextlib.AbstractAsyncContextManager[None]:
    """Hold a place of the pool that is in use, once there is one. Not inside another such block."""
    return (_current.get() or _process_workers).long_work[kind]


@dataclass(eq=False)
class PoolExecutor(concurrent.futures.Executor):
    """A pool's `run` for a library that calls `loop.run_in_executor`, as aiofiles does.

    The loop takes a future of its own as it is (asyncio.wrap_future).
    """

    _run: Callable[..., Awaitable[Any]]

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return asyncio.ensure_future(self._run(fn, *args, **kwargs))


EXECUTOR = PoolExecutor(run)
"""The pool that is in use."""


@contextlib.asynccontextmanager
async def turn() -> AsyncIterator[None]:
    """Run one such block at a time of those that use the pool; one that hangs delays the others by `TURN_S`."""
    turns, has_turn = (_current.get() or _process_workers).turns, False
    try:
        async with asyncio.timeout(TURN_S) as limit:
            has_turn = await turns.acquire()
    except TimeoutError:
        if not limit.expired():
            raise
    try:
        yield
    finally:
        if has_turn:
            turns.release()


@contextlib.asynccontextmanager
async def entered(blocking: contextlib.AbstractContextManager[T]) -> AsyncIterator[T]:
    """The block of a context manager whose beginning and end block: a thread calls each.

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


_process_workers = Workers("this process", limit=64)
"""For a command, and for a daemon before its parts are started."""
