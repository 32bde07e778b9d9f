"""Operations that outlive the call that asked for them, one at a time per key.

grpc.aio cancels a handler when its client's deadline passes, while the thread or the child that the
handler waits for runs on: a naive servicer reports failure and mounts all the same. So work that
changes the host runs here, as a task of its own:

- an identical request for the same key joins the running work and gets its result;
- a different one gets `OperationInProgress`, which names the holder and its age;
- the caller's cancellation cancels the wait, never the work;
- `drain` refuses newcomers and waits for what runs, before a process may exit.

Locks: the process lock (`crust.host.files.flocks`) is outside; inside an operation other keys are taken by `holding`
alone, which never waits.
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
    """Another operation holds the key."""

    def __init__(self, key: Hashable, holder: str, age_s: float) -> None:
        super().__init__(
            f"{key} is busy",
            why=f"{holder} has been running for {age_s:.1f} s",
            hint="retry; the running operation finishes whether or not its caller waits",
        )
        self.key = key
        self.holder = holder
        self.age_s = age_s


class ShuttingDown(errors.PeerUnavailable):
    """The process drains and takes no new work."""

    def __init__(self) -> None:
        super().__init__(
            "this process is stopping", why="it finishes what it began", hint="retry in a moment"
        )


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
        """Run `work` under `key`, or join the identical work that runs already.

        `identity` holds whatever makes two requests the same (their arguments, secrets left out); it
        is compared by equality. Raises `OperationInProgress`, `ShuttingDown`, and whatever `work` raises.
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
    def shared(self, key: Hashable, name: str = "a call that is handed on") -> Iterator[None]:
        """Something that must not meet an operation of `key`, and is none: neither starts while the other runs.

        Any number may be beside each other. Raises `OperationInProgress`.
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
        """Hold other keys too, all or none, for as long as the running operation needs the things they stand for.

        It never waits, so no two can wait for each other. Nobody joins it. Raises `OperationInProgress`.
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
            _log.info("operation finished after its callers left", extra={"op": running.name})
            return
        _log.warning(
            "operation failed after its callers left",
            extra={"op": running.name, "error": str(error)},
        )
