"""Operations that outlive the call that requested them, one at a time per key.

grpc.aio cancels a handler when its client's deadline passes, but the thread or the child process that the handler
waits for goes on. Without this module a servicer would report a failure and mount all the same. So work that changes
the host runs here, in a task of its own:

- an identical request for the same key joins the running operation and gets its result;
- a different request gets `OperationInProgress`, which names the running operation and its age;
- if the caller is cancelled, only its wait is cancelled, never the operation;
- `drain` refuses new operations and waits for the running ones, before a process may exit.

Order of locks: the process lock (`crust.host.files.flocks`) comes first. Inside an operation only `holding` takes
other keys, and it never waits.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

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


class ShuttingDown(errors.PeerUnavailable):
    """The process is stopping and starts no new operations."""

    def __init__(self) -> None:
        super().__init__(
            "this process is stopping",
            why="it finishes its running operations and starts no new ones",
            hint="retry in a moment",
        )


_ROUNDS_TO_ANSWER = 3
"""Rounds of the event loop: one ends the operation's task, one wakes its callers, who answer in it."""


def after_answer(call: Callable[[], None]) -> None:
    """Inside an operation that ends now: call `call` when its callers have answered, or if there is none any more.

    For log lines, metrics and events, which a caller need not wait for. Calls keep their order.
    """
    _after_rounds(_ROUNDS_TO_ANSWER, call)


def _after_rounds(rounds: int, call: Callable[[], None]) -> None:
    if rounds:
        asyncio.get_running_loop().call_soon(_after_rounds, rounds - 1, call)
    else:
        call()


@dataclass(slots=True)
class _Running:
    name: str
    identity: object
    task: asyncio.Task[Any]
    waiters: int = 0
    started_s: float = field(default_factory=time.monotonic)


class KeyedOperations:
    """The operations that run in this process, by key."""

    def __init__(self) -> None:
        self._running: dict[Hashable, _Running] = {}
        self._shared: dict[Hashable, list[str]] = {}
        self._draining = False

    async def run(
        self, key: Hashable, name: str, identity: object, work: Callable[[], Awaitable[T]]
    ) -> T:
        """Run `work` under `key`, or join the identical operation that runs already.

        Two requests are identical if their `identity` is equal: their arguments, without secrets. Raises
        `OperationInProgress`, `ShuttingDown`, and whatever `work` raises.
        """
        if self._draining:
            raise ShuttingDown()
        running = self._running.get(key)
        if running is None:
            self._check_shared(key)
            running = self._start(key, name, identity, work)
        elif running.name != name or running.identity != identity:
            raise OperationInProgress(key, running.name, time.monotonic() - running.started_s)
        running.waiters += 1
        try:
            return cast("T", await asyncio.shield(running.task))
        finally:
            running.waiters -= 1

    @contextmanager
    def shared(self, key: Hashable, name: str = "a pass-through call") -> Iterator[None]:
        """Exclude operations of `key` while the block runs, for work that is not an operation itself.

        Any number of such blocks may share the key. Raises `OperationInProgress` while an operation of `key` runs; an
        operation raises the same while such a block runs.
        """
        running = self._running.get(key)
        if running is not None:
            raise OperationInProgress(key, running.name, time.monotonic() - running.started_s)
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
                raise OperationInProgress(key, holder.name, time.monotonic() - holder.started_s)
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
        _log.warning(
            "operation failed after its callers stopped waiting",
            extra={"op": running.name, "error": error},
        )
