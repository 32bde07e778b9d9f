"""What a controller knows of the store, in memory: announcements, pools, requests and answers, who leads.

It is fed by `watches.Follower` and never written otherwise. A listing replaces all of it.

A pool is where it was announced last: a disk may move to another node. What to do with a pool that two connected
nodes announce is for the reader to say.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from crust.cluster.etcd import keys, records
from crust.cluster.etcd.client.watches import Changes, Listing
from crust.cluster.etcd.keys import Key, Keys
from crust.cluster.protocol import Announcement, Answer
from crust.wire.etcd.v3 import etcd_pb2 as pb

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A request by its key: the node, and the request's id."""

    node_id: str
    request_id: str


class Mirror:
    """The followed range. `on_answer` is called with each answer that appears, and again after each listing."""

    def __init__(self, layout: Keys, on_answer: Callable[[RequestKey, Answer], None]) -> None:
        self._keys = layout
        self._on_answer = on_answer
        self._changed = asyncio.Event()
        self._clear()
        self._settle()

    def _clear(self) -> None:
        self._announced: dict[str, Announcement] = {}
        self._had_since: dict[str, dict[str, int]] = {}
        """Pool, node, the revision at which the node began to announce it."""
        self._decommissioned: set[str] = set()
        self._open: dict[RequestKey, set[str]] = {}
        self.revision = 0
        """The last change that is in here."""
        self.leader = 0
        """The create revision of the leader's key; 0 if nobody leads."""

    def _settle(self) -> None:
        """Make what is asked for without blocking."""
        owners = {pool: max(had, key=had.__getitem__) for pool, had in self._had_since.items()}
        self.retired = frozenset(self._decommissioned)
        self.pools: Mapping[str, str] = {
            pool: node for pool, node in owners.items() if pool not in self.retired
        }
        self.nodes: Mapping[str, Announcement] = dict(self._announced)

    @property
    def open(self) -> Iterable[RequestKey]:
        """All requests and answers that there are."""
        return tuple(self._open)

    async def until(self, check: Callable[[], bool]) -> None:
        """Wait until a change makes `check` true, or return at once."""
        while not check():
            await self._changed.wait()

    def see(self, seen: Listing | Changes) -> None:
        """Take what was followed."""
        if isinstance(seen, Listing):
            self._clear()
            self.revision = seen.revision
            for kv in seen.kvs:
                self._put(kv)
        else:
            for event in seen.events:
                self._apply(event)
        self._settle()
        self._changed.set()
        self._changed = asyncio.Event()

    def _apply(self, event: pb.Event) -> None:
        self.revision = max(self.revision, event.kv.mod_revision)
        if event.type == pb.Event.PUT:
            self._put(event.kv)
        elif key := self._keys.parse(event.kv.key):
            self._drop(key)

    def _put(self, kv: pb.KeyValue) -> None:
        key = self._keys.parse(kv.key)
        if key is None:
            return
        if key.directory == "leader":
            self.leader = kv.create_revision
        elif key.directory == "decommissioned":
            self._decommissioned.add(key.name)
        elif key.kind == keys.POOL:
            self._had_since.setdefault(key.id, {})[key.name] = kv.mod_revision
        elif key.kind == keys.ANNOUNCE:
            self._announce(key, kv)
        else:
            self._ask_or_answer(key, kv)

    def _announce(self, key: Key, kv: pb.KeyValue) -> None:
        try:
            said = records.decode(records.AnnouncementRecord, kv.key, kv.value).announcement()
            if said.node_id != key.name:
                raise records.StoreValueInvalid(kv.key.decode(), f"it speaks for {said.node_id}")
        except records.StoreValueInvalid as problem:
            _log.error("an announcement was ignored", extra={"error": problem, "node": key.name})
            self._announced.pop(key.name, None)
        else:
            self._announced[key.name] = said

    def _ask_or_answer(self, key: Key, kv: pb.KeyValue) -> None:
        asking = RequestKey(key.name, key.id)
        self._open.setdefault(asking, set()).add(key.kind)
        if key.kind == keys.ANSWER:
            self._on_answer(asking, answer_in(kv))

    def _drop(self, key: Key) -> None:
        if key.directory == "leader":
            self.leader = 0
        elif key.directory == "decommissioned":
            self._decommissioned.discard(key.name)
        elif key.kind == keys.POOL:
            self._drop_pool(key)
        elif key.kind == keys.ANNOUNCE:
            self._announced.pop(key.name, None)
        else:
            self._drop_asking(key)

    def _drop_pool(self, key: Key) -> None:
        had = self._had_since.get(key.id, {})
        had.pop(key.name, None)
        if not had:
            self._had_since.pop(key.id, None)

    def _drop_asking(self, key: Key) -> None:
        asking = RequestKey(key.name, key.id)
        kinds = self._open.get(asking, set())
        kinds.discard(key.kind)
        if not kinds:
            self._open.pop(asking, None)


def answer_in(kv: pb.KeyValue) -> Answer:
    """The answer that a node has written."""
    try:
        return records.decode(records.AnswerRecord, kv.key, kv.value).answer()
    except records.StoreValueInvalid as problem:
        return Answer(
            code=13, message=str(problem)
        )  # INTERNAL: the request was perhaps carried out
