"""A node's part in a cluster with one controller: it announces the pool, and carries out what it is asked.

Requests about one volume, snapshot or group are carried out in the order in which they were put, and the next one
begins when the answer to the one before is in the store: so once a later request is answered, no earlier one is
carried out any more, and a controller that got a final answer knows what stands. The records of the pool make a
request that comes twice harmless; within one process it gets the same answer and is not carried out again.

What runs at once, and what waits, is bounded; a request beyond that is answered UNAVAILABLE. So is one that has
returned with a backup of the store, or is from before the node's start: what it is about may have been created again
since. One that nobody waits for any more is not carried out (`crust.cluster.node_calls`).
"""

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError

from crust import errors
from crust.cluster.methods import METHODS
from crust.cluster.node_calls import NodeCalls, answer_of
from crust.cluster.protocol import Announcement, Answer, NodeSide, Request, StoreUnavailable
from crust.rpc.in_process.local import LocalServer

LOOK_EVERY_S = 1.0
REPEAT_EVERY_S = 30.0
AT_ONCE = 32
WAITING = 1024
_REMEMBERED = 1024
_RETRY_S = 1.0

_log = logging.getLogger(__name__)


class TooManyRequests(errors.PeerUnavailable):
    """A node has as many requests as it may keep."""

    def __init__(self, count: int) -> None:
        super().__init__(
            "the node takes no more requests",
            why=f"{count} are waiting",
            hint="retry; if it stays so, look at the node's disk and its log",
        )


class StaleRequest(errors.PeerUnavailable):
    """A request was in the store before the node knew it: it may have been carried out, and be there again."""

    def __init__(self) -> None:
        super().__init__(
            "the request was not carried out",
            why="it is from before the node's start, or from a backup of the store",
            hint="the same call succeeds when it is repeated",
        )


class AnnouncedPool(Protocol):
    """The pool of this node."""

    def pool_id(self) -> str:
        """Its id; empty while none was found. Does not block."""
        ...

    async def announcement(self) -> Announcement | None:
        """What there is to say of it now; None while none was found."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Times and bounds of an agent."""

    look_every_s: float = LOOK_EVERY_S
    """Also the least time between two announcements."""
    repeat_every_s: float = REPEAT_EVERY_S
    at_once: int = AT_ONCE
    waiting: int = WAITING


class Agent:
    """Announces the pool, and carries requests out at `server`."""

    def __init__(
        self,
        store: NodeSide,
        server: LocalServer,
        pool: AnnouncedPool,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._pool = pool
        self._limits = limits or Limits()
        self._calls = NodeCalls(server, pool.pool_id, self._under_way, clock)
        self._said: Announcement | None = None
        self._changed = asyncio.Event()
        self._places = asyncio.Semaphore(self._limits.at_once)
        self._queues: dict[str, collections.deque[str]] = {}
        self._pending: dict[str, Request] = {}
        """By request id: the newest delivery, to which the answer goes."""
        self._answered: collections.OrderedDict[str, Answer] = collections.OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Announce and answer, until cancelled; what was begun goes on in the driver."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_announcing(), name="announcements")
                group.create_task(self._keep_answering(), name="requests of the controller")
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._queues.clear()  # the store delivers them again to the next run
            self._pending.clear()

    async def _keep_announcing(self) -> None:
        said_s = 0.0
        while True:
            self._changed.clear()
            now = await self._now()
            is_due = time.monotonic() - said_s >= self._limits.repeat_every_s
            if now is not None and (now != self._said or is_due) and await self._announce(now):
                said_s = time.monotonic()
            await self._wait_for_change()
            await asyncio.sleep(said_s + self._limits.look_every_s - time.monotonic())

    async def _now(self) -> Announcement | None:
        try:
            return await self._pool.announcement()
        except errors.CrustError as error:
            _log.warning("the pool cannot be announced", extra={"error": error})
            return None

    async def _announce(self, now: Announcement) -> bool:
        try:
            await self._store.announce(now)
        except StoreUnavailable as error:
            _log.warning("this node cannot announce itself", extra={"error": error})
            return False
        self._said = now
        return True

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(self._limits.look_every_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _keep_answering(self) -> None:
        async for request in self._store.requests():
            self._take(request)

    def _take(self, request: Request) -> None:
        """Put a request in its queue, or into the place of its earlier delivery."""
        is_known = request.request_id in self._pending
        if request.has_returned and not is_known and request.request_id not in self._answered:
            self._start(self._refuse(request, StaleRequest()))
            return
        if is_known or len(self._pending) < self._limits.waiting:
            self._pending[request.request_id] = request
        else:
            self._start(self._refuse(request, TooManyRequests(len(self._pending))))
            return
        if is_known:
            return
        subject = _subject(request)
        queue = self._queues.get(subject)
        if queue is not None:
            queue.append(request.request_id)
            return
        self._queues[subject] = collections.deque([request.request_id])
        self._start(self._work(subject))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _refuse(self, request: Request, error: errors.CrustError) -> None:
        try:
            await self._store.answer(request, answer_of(error))
        except StoreUnavailable:
            return  # it is delivered again

    async def _work(self, subject: str) -> None:
        """Carry out the requests of one subject, one after the other."""
        queue = self._queues[subject]
        while queue:
            request_id = queue[0]
            answer = self._answered.get(request_id)
            if answer is None:
                async with self._places:
                    answer = await self._calls.carry_out(self._pending[request_id])
                self._remember(request_id, answer)
            await self._deliver(request_id, answer)
            del self._pending[request_id]
            queue.popleft()
        del self._queues[subject]
        self._changed.set()

    async def _deliver(self, request_id: str, answer: Answer) -> None:
        """Write the answer, however long the store is away: the next request must not begin before."""
        while True:
            try:
                await self._store.answer(self._pending[request_id], answer)
            except StoreUnavailable as error:
                _log.warning("an answer cannot be given yet", extra={"error": error})
                await asyncio.sleep(_RETRY_S)
            except Exception:
                _log.exception("an answer could not be given")
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def _remember(self, request_id: str, answer: Answer) -> None:
        self._answered[request_id] = answer
        if len(self._answered) > _REMEMBERED:
            self._answered.popitem(last=False)

    def _under_way(self) -> struct_pb2.ListValue:
        """The names that requests which are here may still create: they go on, whoever has lost their records."""
        names = struct_pb2.ListValue()
        for subject, queue in self._queues.items():
            methods = (METHODS.get(self._pending[each].method) for each in queue)
            if any(each is not None and each.creates for each in methods):
                names.append(subject)
        return names


def _subject(request: Request) -> str:
    """What a request is about; its own id if that is nothing that others are about."""
    method = METHODS.get(request.method)
    if method is None:
        return request.request_id
    try:
        return method.subject(method.request.FromString(request.message)) or request.request_id
    except DecodeError:
        return request.request_id
