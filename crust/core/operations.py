"""Operations that outlive the call that requested them, one at a time per key.

grpc.aio cancels a handler when its client's deadline passes, but the thread or the child process that the handler
waits for continues. Without this module a servicer would report a failure and mount all the same. So work that
changes the host runs here, in a task of its own:

- an identical request for the same key joins the running operation and gets its result;
- a different request gets `OperationInProgress`, which names the running operation and its age;
- if the caller is cancelled, only its wait is cancelled, never the operation;
- a caller waits no longer than the operation's limit, and is answered before its own deadline (`OperationOverdue`).
  The work itself continues and keeps its key: a system call that hangs cannot be ended, and a second one beside it
  could destroy the data of the first. So a key has one thread at most, however often its callers retry;
- `drain` refuses new operations and waits for the running ones, before a process may exit;
- work without a bound, which a tenant's content makes as long as it wants, asks between its steps whether it is still
  wanted (`check_wanted`), and leaves something that the next request begins from.

An operation may hold several keys, all or none, e.g. a volume and a target; it never waits for one, so no order of
keys is needed. The process lock (`crust.host.files.locks`) comes first.

A look, which blocks and changes nothing, has a key too (`look`): a filesystem that hangs costs one thread, however
often callers ask for it.
"""

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from crust.core import errors

_DEADLINE_SHARE = 0.95
"""The part of a caller's time after which it gets an answer."""

ABANDONED_S = 300.0
"""After this time without a caller nobody wants an operation any more: a kubelet retries within 122 s."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class OperationInProgress(errors.OperationPending):
    def __init__(self, key: Hashable, holder: str, age_s: float) -> None:
        super().__init__(f"{key} is busy", why=f"{holder} has been running for {age_s:.1f} s")
        self.key = key
        self.holder = holder


class OperationOverdue(errors.OperationPending):
    def __init__(self, key: Hashable, name: str, age_s: float) -> None:
        super().__init__(
            f"{name} of {key} has not ended",
            why=f"it has been running for {age_s:.1f} s, and goes on",
        )
        self.key = key
        self.name = name


class SystemCallTimedOut(errors.PeerUnavailable):
    def __init__(self, key: str, timeout_s: float) -> None:
        super().__init__(
            f"{key} does not answer", why=f"the system call has not returned within {timeout_s:g} s"
        )
        self.timeout_s = timeout_s


class ShuttingDown(errors.PeerUnavailable):
    def __init__(self) -> None:
        super().__init__(
            "this process is stopping",
            why="it finishes its running operations and starts no new ones",
        )


class ThreadPool(Protocol):
    """The threads that operations use."""

    async def check_free(self) -> None:
        """Raise an error if no thread is free."""

    async def run(self, function: Callable[[], T], /) -> T:
        """Call `function` on a thread."""

    def used(self) -> AbstractContextManager[None]:
        """Let the tasks of a context that is copied inside the block use these threads."""


@dataclass(slots=True)
class _Running:
    key: Hashable
    name: str
    identity: object
    limit_s: float
    ended_by: object
    task: asyncio.Task[Any] = field(init=False)
    unwanted: str = ""
    """Why it should end early."""
    waiters: int = 0
    started_s: float = field(default_factory=time.monotonic)
    left_s: float = field(default_factory=time.monotonic)
    """When its last caller stopped to wait."""

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s


_current: contextvars.ContextVar[_Running | None] = contextvars.ContextVar(
    "operation", default=None
)


def check_wanted() -> None:
    """Raise `OperationGivenUp` in an operation that should end early; the caller undoes its steps.

    That is so once its process stops, once the operation that ends it was requested (`ended_by`), and after
    `ABANDONED_S` without a caller.
    """
    running = _current.get()
    if running is None:
        return
    why = running.unwanted
    if not running.waiters and time.monotonic() - running.left_s > ABANDONED_S:
        why = f"nobody has waited for it for {ABANDONED_S:g} s"
    if why:
        raise errors.OperationPending.named(
            "OperationGivenUp",
            f"{running.name} of {running.key} was ended before it was complete",
            why=why,
        )


class KeyedOperations:
    """The operations that run in this process, by key, on `threads`."""

    def __init__(self, threads: ThreadPool) -> None:
        self.threads = threads
        self._running: dict[Hashable, _Running] = {}
        """Each operation by each of its keys."""
        self._looks: dict[Hashable, asyncio.Future[Any]] = {}
        self._shared: dict[Hashable, list[str]] = {}
        self._draining = False

    async def run(  # noqa: PLR0913 - an operation, and its caller
        self,
        key: Hashable,
        name: str,
        identity: object,
        work: Callable[[], Coroutine[Any, Any, T]],
        *,
        also: Iterable[Hashable] = (),
        ended_by: object = None,
        limit_s: float = math.inf,
        left_s: float | None = None,
    ) -> T:
        """Run `work` under `key` and the keys of `also`, or join the identical operation that runs already.

        Two requests are identical if their `identity` is equal: their arguments, without secrets. `limit_s` is the
        time of this kind of operation, from its start; `left_s` is the time that the caller has left. A different
        request for `key` whose identity is `ended_by` makes the operation unwanted (`check_wanted`). Raises
        `OperationInProgress`, `OperationOverdue`, `ShuttingDown`, and as `ThreadPool.check_free` and `work`.
        """
        if key not in self._running:
            await self.threads.check_free()
        if self._draining:
            raise ShuttingDown()
        running = self._running.get(key)
        if running is None:
            keys = {key, *also}
            if busy := keys & self._running.keys() | keys & self._shared.keys():
                raise self._busy(busy.pop())
            running = _Running(key, name, identity, limit_s, ended_by)
            with self.threads.used():
                context = contextvars.copy_context()
            context.run(_current.set, running)
            running.task = asyncio.create_task(work(), name=f"{name} {key}", context=context)
            self._running.update(dict.fromkeys(keys, running))
            running.task.add_done_callback(partial(self._finished, keys, running))
        elif (running.key, running.name, running.identity) != (key, name, identity):
            if running.ended_by is not None and running.ended_by == identity:
                running.unwanted = f"{name} was called"
            raise self._busy(key)
        wait_s = min(
            running.started_s + running.limit_s - time.monotonic(),
            math.inf if left_s is None else left_s * _DEADLINE_SHARE,
        )
        running.waiters += 1
        try:
            await asyncio.wait([running.task], timeout=max(wait_s, 0))
        finally:
            running.waiters -= 1
            running.left_s = time.monotonic()
        if not running.task.done():
            raise OperationOverdue(key, running.name, running.age_s)
        return cast("T", running.task.result())

    async def look(
        self,
        key: Hashable,
        function: Callable[[], T],
        *,
        timeout_s: float,
        left_s: float | None = None,
        shown: str = "",
        fresh: bool = False,
    ) -> T:
        """The result of `function`, which blocks and changes nothing, or of the look of this key that runs already.

        All looks of a key have results of one type; operations have other keys. The caller waits for `timeout_s`, and
        for less than the `left_s` that its own caller has. `fresh`: a look that began earlier is not used, because it
        may miss the caller's own change. `shown` is the key in messages. Raises `SystemCallTimedOut`, and the errors
        of `ThreadPool.check_free` and `function`.
        """
        earlier = self._looks.get(key) if fresh else None
        if left_s is not None:
            timeout_s = min(timeout_s, left_s * _DEADLINE_SHARE)
        try:
            async with asyncio.timeout(timeout_s):
                if earlier is not None:
                    await asyncio.wait([earlier])
                if key not in self._looks:
                    await self.threads.check_free()
                if key not in self._looks:  # another caller may have begun it meanwhile
                    look = self._looks[key] = asyncio.ensure_future(self.threads.run(function))
                    look.add_done_callback(partial(self._end_look, key))
                result: T = await asyncio.shield(self._looks[key])
                return result
        except TimeoutError as err:
            raise SystemCallTimedOut(shown or str(key), timeout_s) from err

    def _end_look(self, key: Hashable, look: asyncio.Future[Any]) -> None:
        del self._looks[key]
        error = None if look.cancelled() else look.exception()  # also marks the exception as seen
        if error is not None and not isinstance(error, errors.CrustError | OSError):
            _log.error("a look failed inside crust", exc_info=error)

    def running(self) -> int:
        return len(self._operations())

    def _operations(self) -> list[_Running]:
        return [operation for key, operation in self._running.items() if operation.key == key]

    def in_progress(self) -> tuple[OperationInProgress, ...]:
        """The operations that run, the oldest first."""
        return tuple(
            OperationInProgress(operation.key, operation.name, operation.age_s)
            for operation in self._operations()
        )

    def overdue(self) -> tuple[OperationOverdue, ...]:
        """The operations that have run for longer than their limit."""
        return tuple(
            OperationOverdue(operation.key, operation.name, operation.age_s)
            for operation in self._operations()
            if operation.age_s > operation.limit_s
        )

    @contextmanager
    def shared(self, key: Hashable, name: str = "a pass-through call") -> Iterator[None]:
        """Exclude operations of `key` while the block runs, for work that is not an operation itself.

        Any number of such blocks may share the key. Raises `OperationInProgress` while an operation of `key` runs; an
        operation raises the same while such a block runs.
        """
        if key in self._running:
            raise self._busy(key)
        self._shared.setdefault(key, []).append(name)
        try:
            yield
        finally:
            self._shared[key].remove(name)
            if not self._shared[key]:
                del self._shared[key]

    async def drain(self) -> None:
        """Refuse newcomers and wait until nothing runs; what asks whether it is wanted ends early."""
        self._draining = True
        for running in self._operations():
            running.unwanted = "this process is stopping"
        await self.idle()

    async def idle(self) -> None:
        """Wait until nothing runs; newcomers are not refused."""
        while self._running:
            await asyncio.wait([running.task for running in self._running.values()])

    def _busy(self, key: Hashable) -> OperationInProgress:
        holder = self._running.get(key)
        if holder is None:
            return OperationInProgress(key, self._shared[key][0], 0)
        return OperationInProgress(key, holder.name, holder.age_s)

    def _finished(
        self, keys: Iterable[Hashable], running: _Running, task: asyncio.Task[Any]
    ) -> None:
        for key in keys:
            del self._running[key]
        if running.waiters or task.cancelled():
            return
        error = task.exception()  # also marks the exception as seen
        extra = {"op": running.name}
        if error is None:
            _log.info("operation finished after its callers stopped waiting", extra=extra)
            return
        # Only the name is logged: the text may be a driver's, and contain a secret of the request.
        name = error.error_name if isinstance(error, errors.CrustError) else type(error).__name__
        extra["error_name"] = name
        _log.warning("operation failed after its callers stopped waiting", extra=extra)
