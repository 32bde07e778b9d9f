"""The store as one node sees it: its announcement under a lease, the requests to it, its answers.

The announcement is written again, under a new lease, whenever the lease has ended: after a stop of the node, an
outage of etcd that took longer than the lease, or a wipe. So an empty store is filled again by those who know.

A backup that is restored brings requests back that were answered since, perhaps by the process before this one. What
was there when this process first looked, or is older than what it has seen and none that it has still to answer, is
marked as returned. And the announcement in a backup is older than the one that was written last, if anything was
announced since: that the store has lost its history is announced then, before any request is delivered.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator

from crust.cluster.etcd import keys, records
from crust.cluster.etcd.client import leases, watches, writes
from crust.cluster.etcd.client.client import Client
from crust.cluster.etcd.client.failures import LeaseGone
from crust.cluster.etcd.client.leases import Lease
from crust.cluster.etcd.client.watches import USUAL, Follower, Silence
from crust.cluster.etcd.keys import Keys
from crust.cluster.forever import forever
from crust.cluster.protocol import Announcement, Answer, Request, StoreUnavailable
from crust.wire.etcd.v3 import etcd_pb2 as pb

_log = logging.getLogger(__name__)

_PAUSE_S = 1.0
_TRIES = 5
"""To write what was written by another process of the node, or by an attempt without an answer."""


class EtcdNodeSide:
    """`protocol.NodeSide`. It is connected inside of `connected`."""

    def __init__(
        self, client: Client, keys: Keys, node_id: str, ttl_s: int, silence: Silence = USUAL
    ) -> None:
        self._client = client
        self._keys = keys
        self._node_id = node_id
        self._ttl_s = ttl_s
        self._silence = silence
        self._said: Announcement | None = None
        self._lease: Lease | None = None
        self._began: tuple[int, str, int] | None = None
        self._written = 0
        """The revision at which the announcement was written last, as far as is known here."""
        self._losses = 0
        """How often the store had lost its history when that was noted."""
        self._writing = asyncio.Lock()
        self._seen = 0
        """The revision up to which all requests were seen; 0 before the first look."""
        self._open: dict[bytes, int] = {}
        """The keys of the requests that came since the first look and have no answer, with their deliveries."""
        self._keeper: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator["EtcdNodeSide"]:
        """The announcement lives inside of the block; a normal end removes it at once."""
        try:
            yield self
        finally:
            if self._keeper:
                self._keeper.cancel()
                await asyncio.gather(self._keeper, return_exceptions=True)
            if self._lease:
                await self._lease.revoke()

    async def announce(self, announcement: Announcement) -> None:
        """As the protocol says. One that fails is tried again in the background, until a later one replaces it."""
        self._said = announcement
        if self._keeper is None:
            self._keeper = asyncio.create_task(
                forever(self._keep, "announcement"), name="etcd announcement"
            )
        await self._write()

    async def requests(self) -> AsyncIterator[Request]:
        """As the protocol says."""
        what = f"requests to node {self._node_id} cannot be read"
        follower = Follower(
            self._client, *self._keys.requests(self._node_id), what=what, silence=self._silence
        )
        async with contextlib.aclosing(follower.follow()) as following:
            async for seen in following:
                if isinstance(seen, watches.Listing):
                    await self._announced()
                    found = self._listed(seen)
                else:
                    found = [self._arrived(kv) for kv in _put_in(seen)]
                for request in found:
                    if request:
                        yield request

    async def answer(self, request: Request, answer: Answer) -> None:
        """As the protocol says. The request and the answer change places, so a repetition changes nothing."""
        if not request.delivery:
            return  # it never came from here, and nobody can wait for it
        asked = self._keys.request(self._node_id, request.request_id)
        answered = self._keys.answer(self._node_id, request.request_id)
        record = records.AnswerRecord(
            code=answer.code, message=answer.message[:4096], response=answer.response
        )
        await writes.commit(
            self._client,
            [writes.created_at(asked, request.delivery)],
            [writes.put(answered, record.encoded()), writes.delete(asked)],
            what=f"an answer of node {self._node_id} is not written",
        )
        if self._open.get(asked) == request.delivery:
            del self._open[asked]

    async def _announced(self) -> None:
        """Compare the announcement with the store's, however long that takes: it says what the store has lost."""
        while True:
            try:
                await self._write()
            except StoreUnavailable as problem:
                _log.warning("the node is not announced", extra={"error": problem})
                await asyncio.sleep(_PAUSE_S)
            else:
                return

    def _listed(self, seen: watches.Listing) -> list[Request | None]:
        """Those that have returned marked as such."""
        known = self._seen or seen.revision
        before, self._open = self._open, {}
        self._seen = seen.revision
        found = []
        for kv in sorted(seen.kvs, key=lambda kv: kv.create_revision):
            is_open = before.get(kv.key) == kv.create_revision
            has_returned = kv.create_revision <= known and not is_open
            found.append(self._request(kv, has_returned=has_returned))
        return found

    def _arrived(self, kv: pb.KeyValue) -> Request | None:
        self._seen = max(self._seen, kv.create_revision)
        return self._request(kv, has_returned=False)

    async def _look(self) -> None:
        """Before this node is announced nobody asks it: what is there now is not for this process."""
        first, end = self._keys.requests(self._node_id)
        what = f"requests to node {self._node_id} cannot be read"
        self._seen, _ = await writes.listing(self._client, first, end, what=what)

    async def _write(self) -> None:
        """Write what is to be announced, under a lease that lives. Raises `StoreUnavailable`."""
        async with self._writing:
            said = self._said
            if said is None:
                return
            if not self._seen:
                await self._look()
            for _ in range(2):
                lease = await self._living_lease()
                try:
                    await self._put(said, lease)
                except LeaseGone:
                    lease.end()
                else:
                    return
            raise StoreUnavailable(
                _what(said), "its lease ended at once", "compare the clocks' rates"
            )

    async def _living_lease(self) -> Lease:
        if self._lease is None or not self._lease.left_s:
            self._lease = await leases.grant(self._client, self._ttl_s)
        return self._lease

    async def _put(self, said: Announcement, lease: Lease) -> None:
        """The pool's key is written once per lease: its revision says which node began to announce the pool last."""
        key = self._keys.announce(self._node_id)
        for _ in range(_TRIES):
            losses = self._client.history.losses
            now = dataclasses.replace(said, restored=losses)
            value = records.AnnouncementRecord.of(now).encoded()
            began = (lease.id, said.pool_id, losses)
            operations = [writes.put(key, value, lease.id)]
            if began != self._began:
                operations.append(writes.put(self._keys.pool(self._node_id, said.pool_id), b""))
            response = await writes.commit(
                self._client,
                [writes.written_at(key, self._written)],
                operations,
                [writes.get(key)],
                what=_what(said),
            )
            present = None if response.succeeded else writes.read(response, 0)
            is_done = response.succeeded or self._is_own(present, value, lease)
            if not is_done:
                self._compare(present)
            self._losses = self._client.history.losses
            self._written = present.mod_revision if present else 0
            if is_done:
                self._written = self._written or response.header.revision
                self._began = began
            if is_done and self._losses == losses:
                return
        raise StoreUnavailable(
            _what(said), "another process announces it all the time", "stop the node's other driver"
        )

    def _is_own(self, present: pb.KeyValue | None, value: bytes, lease: Lease) -> bool:
        """Whether an attempt whose answer was lost has written it."""
        if present is None or present.mod_revision <= self._written:
            return False
        return (present.value, present.lease) == (value, lease.id)

    def _compare(self, present: pb.KeyValue | None) -> None:
        """An announcement that is older than the last one is that of a backup, unless that is known already."""
        history = self._client.history
        is_older = present is not None and present.mod_revision < self._written
        if is_older and history.losses == self._losses:
            history.is_lost("what this node announced last is not there")

    async def _keep(self) -> None:
        """Keep the lease; when it has ended, announce again."""
        while True:
            lease = self._lease
            if lease is not None and lease.left_s:
                await lease.keep()
                _log.warning("the node's announcement has ended, and is made again")
            try:
                await self._write()
            except StoreUnavailable as problem:
                _log.warning("the node is not announced", extra={"error": problem})
                await asyncio.sleep(_PAUSE_S)

    def _request(self, kv: pb.KeyValue, *, has_returned: bool) -> Request | None:
        key = self._keys.parse(kv.key)
        if key is None or key.kind != keys.REQUEST:
            return None
        try:
            record = records.decode(records.RequestRecord, kv.key, kv.value)
        except records.StoreValueInvalid as problem:
            _log.error("a request was ignored", extra={"error": problem})
            return None
        if not has_returned:
            self._open[kv.key] = kv.create_revision
        return record.request(key.id, kv.create_revision, has_returned=has_returned)


def _put_in(seen: watches.Changes) -> list[pb.KeyValue]:
    return [each.kv for each in seen.events if each.type == pb.Event.PUT]


def _what(said: Announcement) -> str:
    return f"node {said.node_id} is not announced"
