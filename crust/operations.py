"""Operations that outlive the call that requested them, one at a time per key.

grpc.aio cancels a handler when its client's deadline passes, but the thread or the child process that the handler
waits for goes on. Without this module a servicer would report a failure and mount all the same. So work that changes
the host runs here, in a task of its own:

- an identical request for the same key joins the running operation and gets its result;
- a different request gets `OperationInProgress`, which names the running operation and its age;
- if the caller is cancelled, only its wait is cancelled, never the operation;
- a caller waits no longer than the operation's limit, and is answered before its own deadline (`OperationOverdue`).
  The work itself goes on and keeps its key: a system call that hangs cannot be ended, and a second one beside it
  could destroy what the first one writes. So a key has one thread at most, however often its callers retry;
- `drain` refuses new operations and waits for the running ones, before a process may exit.

Order of locks: the process lock (`crust.host.files.flocks`) comes first. Inside an operation only `holding` takes
other keys, and it never waits.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from crust import errors

_log = logging.getLogger(__name__)

T = TypeVar("T")


class OperationInProgress(errors.OperationPending):
    """Another operation is running for the same key."""

    def __init__(self, key: Hashable, holder: str, age_s: float) -> None:
        super().__init__(
            f"{key} is busy",
            why=f"{holder} has been running for {age_s:.1f} s",
            hint="retry; the running operation finishes even if its caller stops waiting",
        )
        self.key = key
        self.holder = holder
        self.age_s = age_s


class OperationOverdue(errors.OperationPending):
    """An operation has not ended in the time that its caller, or its kind of work, has."""

    def __init__(self, key: Hashable, name: str, age_s: float) -> None:
        super().__init__(
            f"{name} of {key} has not ended",
            why=f"it has been running for {age_s:.1f} s, and goes on",
            hint="retry; if it never ends, check the volume's disk and the kernel log for a call that hangs",
        )
        self.key = key
        self.name = name
        self.age_s = age_s


class ShuttingDown(errors.PeerUnavailable):
    """The process is stopping and starts no new operations."""

    def __init__(self) -> None:
        super().__init__(
            "this process is stopping",
            why="it finishes its running operations and starts no new ones",
            hint="retry in a moment",
        )


AFTER_ANSWER_S = 0.002
"""So long this process leaves the processor to those who get an answer: the caller is woken by it, through several
threads, and on a busy node a log line first would take as long as a tenth of the call."""


def after_answer(call: Callable[[], object]) -> None:
    """Before an answer: call `call` when it has been sent, or if there is no caller any more.

    For log lines, metrics and events. Calls keep their order.
    """
    asyncio.get_running_loop().call_later(AFTER_ANSWER_S, call)


class ThreadPool(Protocol):
    """The threads that operations use."""

    async def check_free(self) -> None:
        """Raise an error if none can be had now."""
        ...

    def used(self) -> AbstractContextManager[None]:
        """Make them those of the tasks that are created inside the block."""
        ...


async def _ended(task: "asyncio.Task[Any]", timeout_s: float | None) -> None:
    """Wait for the task, and never cancel it. As asyncio.wait, which costs a multiple for a single task."""
    if task.done():
        return
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(*_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    task.add_done_callback(wake)
    try:
        await waiter
    finally:
        task.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()


ANSWER_AT = 0.95
"""The part of a caller's time after which it gets an answer."""


@dataclass(slots=True)
class _Running:
    name: str
    identity: object
    task: asyncio.Task[Any]
    limit_s: float | None = None
    waiters: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s

    def wait_s(self, left_s: float | None) -> float | None:
        """How long a caller with `left_s` may wait: nothing is left of an operation that is overdue."""
        times = [] if self.limit_s is None else [max(self.limit_s - self.age_s, 0)]
        if left_s is not None:
            times.append(left_s * ANSWER_AT)
        return min(times, default=None)


class KeyedOperations:
    """The operations that run in this process, by key, on `threads` if they are given."""

    def __init__(self, threads: ThreadPool | None = None) -> None:
        self.threads = threads
        self._running: dict[Hashable, _Running] = {}
        self._shared: dict[Hashable, list[str]] = {}
        self._draining = False

    async def run(
        self,
        key: Hashable,
        name: str,
        identity: object,
        work: Callable[[], Awaitable[T]],
        *,
        limit_s: float | None = None,
        left_s: float | None = None,
    ) -> T:
        """Run `work` under `key`, or join the identical operation that runs already.

        Two requests are identical if their `identity` is equal: their arguments, without secrets. `limit_s` is the
        time of this kind of operation, from its start, and `left_s` that of the caller. Raises
        `OperationInProgress`, `OperationOverdue`, `ShuttingDown`, what `ThreadPool.check_free` raises, and whatever
        `work` raises.
        """
        if self.threads is not None and key not in self._running:
            await self.threads.check_free()
        if self._draining:
            raise ShuttingDown()
        running = self._running.get(key)
        if running is None:
            self._check_shared(key)
            running = self._start(key, name, identity, work)
            running.limit_s = limit_s
        elif running.name != name or running.identity != identity:
            raise OperationInProgress(key, running.name, running.age_s)
        return cast("T", await self._wait(key, running, left_s))

    async def _wait(self, key: Hashable, running: _Running, left_s: float | None) -> Any:
        running.waiters += 1
        try:
            await _ended(running.task, running.wait_s(left_s))
        finally:
            running.waiters -= 1
        if running.task.done():
            return running.task.result()
        raise OperationOverdue(key, running.name, running.age_s)

    def running(self) -> int:
        """How many operations run."""
        return len(self._running)

    def in_progress(self) -> tuple[OperationInProgress, ...]:
        """The operations that run."""
        return tuple(
            OperationInProgress(key, each.name, each.age_s) for key, each in self._running.items()
        )

    def overdue(self) -> tuple[OperationOverdue, ...]:
        """The operations that have run for longer than their limit."""
        return tuple(
            OperationOverdue(key, each.name, each.age_s)
            for key, each in self._running.items()
            if each.limit_s is not None and each.age_s > each.limit_s
        )

    @contextmanager
    def shared(self, key: Hashable, name: str = "a pass-through call") -> Iterator[None]:
        """Exclude operations of `key` while the block runs, for work that is not an operation itself.

        Any number of such blocks may share the key. Raises `OperationInProgress` while an operation of `key` runs; an
        operation raises the same while such a block runs.
        """
        running = self._running.get(key)
        if running is not None:
            raise OperationInProgress(key, running.name, running.age_s)
        self._shared.setdefault(key, []).append(name)
        try:
            yield
        finally:
            self._shared[key].remove(name)
            if not self._shared[key]:
                del self._shared[key]

    @contextmanager
    def holding(self, keys: Iterable[Hashable], name: str) -> Iterator[None]:
        """Hold other keys too, all or none, while the block runs. For use inside a running operation.

        It never waits, so it cannot deadlock. No request joins such a hold. Raises `OperationInProgress`.
        """
        task = asyncio.current_task()
        assert task is not None, "only an operation holds keys"
        wanted = frozenset(keys)
        for key in wanted:
            holder = self._running.get(key)
            if holder is not None:
                raise OperationInProgress(key, holder.name, holder.age_s)
            self._check_shared(key)
        self._running.update({key: _Running(name, object(), task) for key in wanted})
        try:
            yield
        finally:
            for key in wanted:
                del self._running[key]

    async def drain(self) -> None:
        """Refuse newcomers and wait until nothing runs."""
        self._draining = True
        await self.idle()

    async def idle(self) -> None:
        """Wait until nothing runs; newcomers are not refused."""
        while self._running:
            await asyncio.wait([running.task for running in self._running.values()])

    def _check_shared(self, key: Hashable) -> None:
        if key in self._shared:
            raise OperationInProgress(key, self._shared[key][0], 0)

    def _start(
        self, key: Hashable, name: str, identity: object, work: Callable[[], Awaitable[T]]
    ) -> _Running:
        async def guarded() -> T:
            return await work()

        with nullcontext() if self.threads is None else self.threads.used():
            task = asyncio.create_task(guarded(), name=f"{name} {key}")
        running = _Running(name, identity, task)
        self._running[key] = running
        task.add_done_callback(lambda done: self._finished(key, running, done))
        return running

    def _finished(self, key: Hashable, running: _Running, task: asyncio.Task[Any]) -> None:
        del self._running[key]
        if running.waiters or task.cancelled():
            return
        error = task.exception()  # also marks the exception as seen
        if error is None:
            _log.info(
                "operation finished after its callers stopped waiting", extra={"op": running.name}
            )
            return
        # By its name alone: its text may be a driver's, with a secret of the request, which is not known here.
        named = error.error_name if isinstance(error, errors.CrustError) else type(error).__name__
        _log.warning(
            "operation failed after its callers stopped waiting",
            extra={"op": running.name, "error_name": named},
        )
