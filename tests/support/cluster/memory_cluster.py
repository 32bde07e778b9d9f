"""A store for a cluster in memory, with faults: what a controller and its nodes meet when the real one misbehaves.

It passes the contract of `tests.support.cluster.cluster_contract`, as the real stores do. A fault is a method of
`Store`, and lasts until it is taken back; nothing happens by chance or by time.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from crust.cluster import retirement
from crust.cluster.protocol import (
    Announcement,
    Answer,
    LeadershipLost,
    NodeAbsent,
    Request,
    StoreUnavailable,
)


class _Changes:
    """Wakes whoever waits for a change of anything."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(slots=True)
class Kept:
    """What is in the store."""

    announcements: dict[str, Announcement] = field(default_factory=dict)
    pools: dict[str, str] = field(default_factory=dict)
    retired: dict[str, str] = field(default_factory=dict)
    requests: dict[tuple[str, str], Request] = field(default_factory=dict)
    answers: dict[tuple[str, str], Answer] = field(default_factory=dict)
    placements: dict[str, str] = field(default_factory=dict)


class Store:
    """The store, and its faults."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.changes = _Changes()
        self.leader: Term | None = None
        self.asked: list[tuple[str, Request]] = []
        """Every request that was put, with its node."""
        self._cut: set[str] = set()
        self._reconnects: dict[str, int] = {}
        self._lost_answers = 0
        self._late = False

    def node(self, node_id: str) -> "MemoryNode":
        """The store as the node sees it."""
        return MemoryNode(self, node_id)

    def controller(self, name: str = "controller") -> "MemoryController":
        """The store as the controller `name` sees it."""
        return MemoryController(self, name)

    def cut(self, name: str) -> None:
        """Take the connection of a node, or of a controller, away: a node's announcement ends with it."""
        self._cut.add(name)
        self.kept.announcements.pop(name, None)
        if self.leader is not None and self.leader.name == name:
            self.depose()
        self.changes.tell()

    def heal(self, name: str) -> None:
        """Give it back; a node gets its unanswered requests again."""
        self._cut.discard(name)
        self.redeliver(name)

    def redeliver(self, node_id: str) -> None:
        """Deliver a node's unanswered requests once more."""
        self._reconnects[node_id] = self.generation(node_id) + 1
        self.changes.tell()

    def wipe(self) -> None:
        """Lose all that is kept, and the leader with it. Connected nodes have to announce themselves again."""
        self.kept = Kept()
        self.depose()

    def depose(self) -> None:
        """End the leader's term."""
        if self.leader is not None:
            self.leader.end()
        self.leader = None
        self.changes.tell()

    def lose_next_answer(self) -> None:
        """Tell the node that its next answer arrived, and lose it."""
        self._lost_answers += 1

    def hold_answers(self, *, held: bool) -> None:
        """Keep answers from the controller, until they are let through."""
        self._late = held
        self.changes.tell()

    def check(self, name: str) -> None:
        """Raise `StoreUnavailable` if that one is cut off."""
        if name in self._cut:
            raise StoreUnavailable("the store cannot be reached", why=f"{name} is cut off")

    def generation(self, node_id: str) -> int:
        """How often the node's connection began again."""
        return self._reconnects.get(node_id, 0)

    def put_answer(self, node_id: str, request: Request, answer: Answer) -> None:
        """Keep an answer, unless it is lost or nobody asked."""
        key = (node_id, request.request_id)
        known = self.kept.requests.get(key)
        if known is None or known.delivery != request.delivery:
            return
        del self.kept.requests[key]
        if self._lost_answers:
            self._lost_answers -= 1
        else:
            self.kept.answers[key] = answer
        self.changes.tell()

    def take_answer(self, node_id: str, request_id: str) -> Answer | None:
        """The answer, if it is there and not held back."""
        return None if self._late else self.kept.answers.get((node_id, request_id))


class MemoryNode:
    """`NodeSide`."""

    def __init__(self, store: Store, node_id: str) -> None:
        self._store = store
        self._node_id = node_id

    async def announce(self, announcement: Announcement) -> None:
        """See `NodeSide`."""
        self._store.check(self._node_id)
        kept = self._store.kept
        kept.announcements[self._node_id] = announcement
        if announcement.pool_id not in kept.retired:
            kept.pools[announcement.pool_id] = self._node_id
        self._store.changes.tell()

    async def requests(self) -> AsyncIterator[Request]:
        """See `NodeSide`."""
        seen: set[tuple[int, int]] = set()
        while True:
            request = self._next(seen)
            if request is None:
                await self._store.changes.wait()
            else:
                yield request

    def _next(self, seen: set[tuple[int, int]]) -> Request | None:
        try:
            self._store.check(self._node_id)
        except StoreUnavailable:
            return None
        generation = self._store.generation(self._node_id)
        for (node_id, _), request in self._store.kept.requests.items():
            if node_id == self._node_id and (generation, request.delivery) not in seen:
                seen.add((generation, request.delivery))
                return request
        return None

    async def answer(self, request: Request, answer: Answer) -> None:
        """See `NodeSide`."""
        self._store.check(self._node_id)
        self._store.put_answer(self._node_id, request, answer)


class Term:
    """`Leadership`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ended = asyncio.Event()

    @property
    def is_held(self) -> bool:
        """See `Leadership`."""
        return not self._ended.is_set()

    async def lost(self) -> None:
        """See `Leadership`."""
        await self._ended.wait()

    def end(self) -> None:
        """End the term."""
        self._ended.set()


class MemoryController:
    """`ControllerSide`. Its index of the nodes is the store's."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._term: Term | None = None

    async def ready(self, timeout_s: float) -> None:
        """See `ControllerSide`."""
        self._store.check(self._name)

    def problem(self) -> StoreUnavailable | None:
        """See `ControllerSide`."""
        try:
            self._store.check(self._name)
        except StoreUnavailable as problem:
            return problem
        return None

    def nodes(self) -> Mapping[str, Announcement]:
        """See `ControllerSide`."""
        return dict(self._store.kept.announcements)

    def known_pools(self) -> Mapping[str, str]:
        """See `ControllerSide`."""
        return dict(self._store.kept.pools)

    def retired_pools(self) -> frozenset[str]:
        """See `ControllerSide`."""
        return frozenset(self._store.kept.retired)

    async def ask(self, node_id: str, request: Request, timeout_s: float) -> Answer:
        """See `ControllerSide`."""
        self._check()
        key = (node_id, request.request_id)
        if key not in self._store.kept.requests and key not in self._store.kept.answers:
            self._store.asked.append((node_id, request))
            delivery = len(self._store.asked)
            self._store.kept.requests[key] = dataclasses.replace(request, delivery=delivery)
            self._store.changes.tell()
        try:
            async with asyncio.timeout(timeout_s):
                while (answer := self._store.take_answer(*key)) is None:
                    await self._store.changes.wait()
                    self._store.check(self._name)
        except TimeoutError:
            raise NodeAbsent(self._pool_of(node_id), node_id) from None
        self._store.kept.answers.pop(key, None)
        return answer

    async def place(self, key: str, pool_id: str) -> str:
        """See `ControllerSide`."""
        self._check()
        return self._store.kept.placements.setdefault(key, pool_id)

    async def placement(self, key: str) -> str:
        """See `ControllerSide`."""
        self._store.check(self._name)
        return self._store.kept.placements.get(key, "")

    async def unplace(self, key: str, pool_id: str) -> None:
        """See `ControllerSide`."""
        self._check()
        if self._store.kept.placements.get(key) == pool_id:
            del self._store.kept.placements[key]

    async def unplace_all(self, beginnings: Sequence[str]) -> None:
        """See `ControllerSide`."""
        self._check()
        placements = self._store.kept.placements
        for key in [each for each in placements if each.startswith(tuple(beginnings))]:
            del placements[key]

    async def placements(self, after: str, limit: int) -> tuple[tuple[str, str], ...]:
        """See `ControllerSide`."""
        self._store.check(self._name)
        rows = sorted(self._store.kept.placements.items())
        return tuple(row for row in rows if row[0] > after)[:limit]

    async def retire(self, node_id: str) -> tuple[str, ...]:
        """See `ControllerSide`."""
        self._store.check(self._name)
        kept = self._store.kept
        pools = retirement.of_node(self._known(), node_id)
        for pool_id in pools:
            kept.pools.pop(pool_id, None)
            kept.retired[pool_id] = node_id
        self._store.changes.tell()
        return pools

    async def retire_pool(self, pool_id: str) -> None:
        """See `ControllerSide`."""
        self._store.check(self._name)
        retirement.check_pool(self._known(), pool_id)
        self._store.kept.retired.setdefault(pool_id, "")
        self._store.changes.tell()

    def _known(self) -> retirement.Known:
        kept = self._store.kept
        announced = {node: said.pool_id for node, said in kept.announcements.items()}
        return retirement.Known(announced, kept.pools, kept.retired)

    @contextlib.asynccontextmanager
    async def lead(self, name: str) -> AsyncIterator[Term]:
        """See `ControllerSide`."""
        while self._store.leader is not None:
            await self._store.changes.wait()
        term = self._term = self._store.leader = Term(self._name)
        try:
            yield term
        finally:
            if self._store.leader is term:
                self._store.depose()

    def _check(self) -> None:
        self._store.check(self._name)
        if self._term is None or self._store.leader is not self._term:
            raise LeadershipLost()

    def _pool_of(self, node_id: str) -> str:
        pools = self._store.kept.pools
        return next((pool for pool, node in pools.items() if node == node_id), "")
