"""The store as a controller sees it: `protocol.ControllerSide`, put together from the modules beside it.

`mirror` has in memory what the store says, `inbox` who waits for which answer, `leadership` the term. What is written
compares the term's revision, so a controller that was replaced without knowing it changes nothing.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Mapping, Sequence

from crust.cluster.etcd import leadership, records, retiring
from crust.cluster.etcd.client import writes
from crust.cluster.etcd.client.client import CALL_S, Client
from crust.cluster.etcd.client.methods import RANGE
from crust.cluster.etcd.client.watches import USUAL, Follower, Silence
from crust.cluster.etcd.inbox import KEEP_S, Inbox
from crust.cluster.etcd.keys import Keys
from crust.cluster.etcd.leadership import Term
from crust.cluster.etcd.mirror import Mirror, RequestKey, answer_in
from crust.cluster.forever import forever
from crust.cluster.protocol import (
    Announcement,
    Answer,
    LeadershipLost,
    NodeAbsent,
    Request,
    StoreUnavailable,
)
from crust.wire.etcd.v3 import etcd_pb2 as pb

_log = logging.getLogger(__name__)

_PAUSE_S = 1.0
_LEAVE_S = 2.0
_BATCH = writes.MAX_OPERATIONS // 2
"""Each asking has two keys."""


class EtcdControllerSide:
    """`protocol.ControllerSide`. It is connected inside of `connected`."""

    def __init__(
        self,
        client: Client,
        layout: Keys,
        ttl_s: int,
        *,
        silence: Silence = USUAL,
        keep_s: float = KEEP_S,
    ) -> None:
        self._client = client
        self._keys = layout
        self._ttl_s = ttl_s
        self._keep_s = keep_s
        self._inbox = Inbox(keep_s)
        self._mirror = Mirror(layout, self._inbox.answer)
        what = "the nodes cannot be read"
        self._follower = Follower(client, *layout.followed(), what=what, silence=silence)
        self._term: Term | None = None
        self._not_leading: StoreUnavailable | None = None
        """Why this controller could not try to lead when nobody did."""

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator["EtcdControllerSide"]:
        """Follow the store inside of the block."""
        following = asyncio.create_task(forever(self._follow, "cluster"), name="etcd cluster")
        try:
            yield self
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def ready(self, timeout_s: float) -> None:
        """See the protocol."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._mirror.until(lambda: self._mirror.revision > 0)
        except TimeoutError:
            why = f"it was not read within {timeout_s:g} s"
            raise StoreUnavailable("the nodes are not known", why) from None

    def problem(self) -> StoreUnavailable | None:
        """See the protocol."""
        found = self._follower.problem or self._not_leading
        return found or self._client.refused("the store may refuse this controller")

    def nodes(self) -> Mapping[str, Announcement]:
        """See the protocol."""
        return self._mirror.nodes

    def known_pools(self) -> Mapping[str, str]:
        """See the protocol."""
        return self._mirror.pools

    def retired_pools(self) -> frozenset[str]:
        """See the protocol."""
        return self._mirror.retired

    async def ask(self, node_id: str, request: Request, timeout_s: float) -> Answer:
        """See the protocol. Raises `LeadershipLost` as well."""
        term = self._leading()
        asking = RequestKey(node_id, request.request_id)
        try:
            async with asyncio.timeout(timeout_s):
                await self._inbox.settled(asking)
                with self._inbox.waiting(asking) as answered:
                    await self._put(term, asking, request, timeout_s)
                    return await answered
        except TimeoutError:
            if not self._follower.is_connected:
                why = "the store cannot be read, in which the answer will be"
                raise StoreUnavailable(f"node {node_id} was not heard", why) from None
            raise NodeAbsent(request.pool_id, node_id) from None

    async def place(self, key: str, pool_id: str) -> str:
        """See the protocol."""
        term = self._leading()
        placed = self._keys.placement(key)
        response = await self._write(
            term,
            [writes.absent(placed)],
            [writes.put(placed, pool_id.encode())],
            [writes.get(placed)],
            what=f"the pool of {key} is not recorded",
        )
        if response.succeeded:
            return pool_id
        present = writes.read(response, 1)
        return present.value.decode() if present else pool_id

    async def placement(self, key: str) -> str:
        """See the protocol."""
        request = pb.RangeRequest(key=self._keys.placement(key))
        found = await self._client.call(RANGE, request, what=f"the pool of {key} cannot be read")
        return found.kvs[0].value.decode() if found.kvs else ""

    async def unplace(self, key: str, pool_id: str) -> None:
        """See the protocol."""
        term = self._leading()
        placed = self._keys.placement(key)
        what = f"the record of the pool of {key} is not removed"
        found = await self._client.call(RANGE, pb.RangeRequest(key=placed), what=what)
        if not found.kvs or found.kvs[0].value != pool_id.encode():
            return
        # not the value alone: etcd may carry this out late, after the name was placed there again
        same = writes.created_at(placed, found.kvs[0].create_revision)
        await self._write(term, [same], [writes.delete(placed)], what=what)

    async def unplace_all(self, beginnings: Sequence[str]) -> None:
        """See the protocol."""
        ranges = [self._keys.placements(each) for each in beginnings]
        operations = [writes.delete(*each) for each in ranges]
        await self._write(self._leading(), [], operations, what="records are not removed")

    async def placements(self, after: str, limit: int) -> tuple[tuple[str, str], ...]:
        """See the protocol."""
        first, end = self._keys.placements()
        start = self._keys.placement(after) + b"\0" if after else first
        request = pb.RangeRequest(key=start, range_end=end, limit=limit)
        found = await self._client.call(RANGE, request, what="the placements cannot be read")
        keys = [(self._keys.parse(kv.key), kv.value.decode()) for kv in found.kvs]
        return tuple((key.name, pool) for key, pool in keys if key is not None)

    async def retire(self, node_id: str) -> tuple[str, ...]:
        """See the protocol."""
        return await retiring.retire(self._client, self._keys, node_id)

    async def retire_pool(self, pool_id: str) -> None:
        """See the protocol."""
        await retiring.retire_pool(self._client, self._keys, pool_id)

    @contextlib.asynccontextmanager
    async def lead(self, name: str) -> AsyncIterator[Term]:
        """See the protocol."""
        campaign = leadership.term(
            self._client, self._keys, self._mirror, name, self._ttl_s, self._tried
        )
        async with campaign as term:
            self._term = term
            tidying = forever(functools.partial(self._tidy, term), "answers")
            parts = [asyncio.create_task(each) for each in (tidying, self._end(term))]
            try:
                yield term
            finally:
                self._term = None
                for each in parts:
                    each.cancel()
                await asyncio.gather(*parts, return_exceptions=True)
                await self._leave(term)
                self._inbox.fail(LeadershipLost())

    def _tried(self, problem: StoreUnavailable | None) -> None:
        self._not_leading = problem

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._follower.follow()) as following:
            async for seen in following:
                self._mirror.see(seen)

    def _leading(self) -> Term:
        if self._term is None or not self._term.is_held:
            raise LeadershipLost
        return self._term

    async def _write(
        self,
        term: Term,
        compare: Sequence[pb.Compare],
        success: Sequence[pb.RequestOp],
        otherwise: Sequence[pb.RequestOp] = (),
        *,
        what: str,
        timeout_s: float = CALL_S,
    ) -> pb.TxnResponse:
        """Write as the leader. The operation 0 of `otherwise` reads the leader's key. Raises `LeadershipLost`."""
        while True:
            await term.settle(self._client)
            written = term.written
            response = await writes.commit(
                self._client,
                [*term.unchanged(), *compare],
                success,
                [writes.get(self._keys.leader), *otherwise],
                what=what,
                timeout_s=timeout_s,
                in_doubt=term.doubt,
            )
            if response.succeeded:
                return response
            leader = writes.read(response, 0)
            is_older = leader is not None and leader.mod_revision < written  # of a backup
            if leader is None or leader.create_revision != term.revision or is_older:
                term.end()
                raise LeadershipLost
            if leader.mod_revision == written:
                return response
            term.written = max(term.written, leader.mod_revision)

    async def _put(
        self, term: Term, asking: RequestKey, request: Request, timeout_s: float
    ) -> None:
        """Put a request, unless it is there; take its answer if that is there."""
        asked = self._keys.request(asking.node_id, asking.request_id)
        answered = self._keys.answer(asking.node_id, asking.request_id)
        response = await self._write(
            term,
            [writes.absent(asked), writes.absent(answered)],
            [writes.put(asked, records.RequestRecord.of(request).encoded())],
            [writes.get(answered)],
            what=f"node {asking.node_id} cannot be asked",
            timeout_s=min(timeout_s, CALL_S),
        )
        if not response.succeeded and (found := writes.read(response, 1)):
            self._inbox.answer(asking, answer_in(found))

    async def _end(self, term: Term) -> None:
        await term.lost()
        self._inbox.fail(LeadershipLost())

    async def _tidy(self, term: Term) -> None:
        """Delete the requests and answers that nobody needs, as long as the term lasts."""
        while True:
            due = self._inbox.to_delete(self._mirror.open, _BATCH)
            if not due:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._keep_s / 4):
                        await self._inbox.work.wait()
                continue
            try:
                await self._delete(term, due)
            except StoreUnavailable as problem:
                _log.info("answers that were read are not deleted yet", extra={"error": problem})
                await asyncio.sleep(_PAUSE_S)
            except LeadershipLost:
                return
            else:
                self._inbox.deleted()

    async def _leave(self, term: Term) -> None:
        """Delete what was read, if there is time; else the next leader does."""
        with contextlib.suppress(StoreUnavailable, LeadershipLost, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                while term.is_held and (due := self._inbox.to_delete((), _BATCH)):
                    await self._delete(term, due)
                    self._inbox.deleted()

    async def _delete(self, term: Term, due: frozenset[RequestKey]) -> None:
        """Delete, and wait until the mirror knows: it must not report an old answer once it is asked again."""
        operations = [
            writes.delete(make(each.node_id, each.request_id))
            for each in due
            for make in (self._keys.request, self._keys.answer)
        ]
        response = await self._write(term, [], operations, what="answers are not deleted")
        if any(each.response_delete_range.deleted for each in response.responses):
            await self._mirror.until(lambda: self._mirror.revision >= response.header.revision)
