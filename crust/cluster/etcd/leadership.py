"""The leader's key, the term of a leader, and the way to one.

A term is the create revision of the leader's key, and every write of a leader compares it. So a controller that was
away and does not know yet that another one leads writes nothing: etcd refuses it, whatever the clocks say. The
lease's time is for everything else: to stop asking, and to let another one lead.

Every write also compares when the key was written last. After an attempt without an answer the leader writes its key
again before it writes anything else: from then on etcd refuses that attempt. Otherwise a request that was answered
long ago could be put again by it, and a node that has started since would create a volume that was deleted.

A backup that is restored brings a leader's key back, with its lease. So a term also ends when the store's history was
lost: etcd would take the writes of that leader, and what it remembers is of the other history.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from crust.cluster.etcd import records
from crust.cluster.etcd.client import leases, writes
from crust.cluster.etcd.client.client import Client
from crust.cluster.etcd.client.failures import LeaseGone
from crust.cluster.etcd.client.history import History
from crust.cluster.etcd.client.leases import Lease
from crust.cluster.etcd.keys import Keys
from crust.cluster.etcd.mirror import Mirror
from crust.cluster.protocol import LeadershipLost, StoreUnavailable
from crust.wire.etcd.v3 import etcd_pb2 as pb

_log = logging.getLogger(__name__)

_PAUSE_S = 1.0
_LOST_S = 0.1


@dataclass(frozen=True, slots=True)
class _Won:
    """A leader's key that was made, and how often the store had lost its history before."""

    key: bytes
    value: bytes
    revision: int
    lease: Lease
    losses: int


class Term:
    """`protocol.Leadership`."""

    def __init__(self, won: "_Won", history: History) -> None:
        self._key = won.key
        self._value = won.value
        self._lease = won.lease
        self._history = history
        self._losses = won.losses
        self._ended = asyncio.Event()
        self._renewing = asyncio.Lock()
        self._is_in_doubt = False
        self.revision = won.revision
        self.written = won.revision
        """The revision at which the leader's key was written last, as far as is known here."""

    @property
    def is_held(self) -> bool:
        """See the protocol."""
        is_same = self._history.losses == self._losses
        return is_same and not self._ended.is_set() and self._lease.left_s > 0

    async def history_lost(self) -> None:
        """Return when the store has lost what it had when the term began: its key may be there again."""
        await self._history.lost(self._losses)

    async def lost(self) -> None:
        """See the protocol."""
        await self._ended.wait()

    def end(self) -> None:
        """It has ended."""
        self._ended.set()

    def unchanged(self) -> Sequence[pb.Compare]:
        """Holds as long as the term has not ended for etcd, and the key was not written since."""
        return (
            writes.created_at(self._key, self.revision),
            writes.written_at(self._key, self.written),
        )

    def doubt(self) -> None:
        """A write had no answer: `settle` before the next one."""
        self._is_in_doubt = True

    async def settle(self, client: Client) -> None:
        """Make sure that no write without an answer is carried out from now on.

        Raises `StoreUnavailable`, and `LeadershipLost`.
        """
        async with self._renewing:
            if not self._is_in_doubt:
                return
            try:
                response = await writes.commit(
                    client,
                    [writes.created_at(self._key, self.revision)],
                    [writes.put(self._key, self._value, self._lease.id)],
                    what="this controller's earlier writes are not settled",
                )
            except LeaseGone:
                self.end()
                raise LeadershipLost from None
            if not response.succeeded:
                self.end()
                raise LeadershipLost
            self.written = response.header.revision
            self._is_in_doubt = False  # what was in doubt has compared an earlier revision


@contextlib.asynccontextmanager
async def term(
    client: Client,
    layout: Keys,
    mirror: Mirror,
    name: str,
    ttl_s: int,
    tried: Callable[[StoreUnavailable | None], None] = lambda _: None,
) -> AsyncIterator[Term]:
    """Wait until `name` leads, and `mirror` has all that was before; lead until the end of the block, or less.

    `tried` is called after each attempt to lead, with what has kept the store from deciding it.
    """
    async with contextlib.AsyncExitStack() as stack:
        while True:
            found = await _won(client, layout, mirror, name, ttl_s, tried)
            won = Term(found, client.history)
            keeper = asyncio.create_task(_keep(won, found.lease, mirror), name="etcd leadership")
            stack.push_async_callback(found.lease.revoke)
            stack.push_async_callback(_cancelled, keeper)
            if await _is_seen(won, mirror):
                break
            await stack.aclose()
        _log.info("this controller leads", extra={"controller": name, "term": won.revision})
        yield won
        won.end()


async def _won(
    client: Client,
    layout: Keys,
    mirror: Mirror,
    name: str,
    ttl_s: int,
    tried: Callable[[StoreUnavailable | None], None],
) -> _Won:
    while True:
        if mirror.leader:
            tried(None)  # another one could
        await mirror.until(lambda: mirror.revision > 0 and mirror.leader == 0)
        losses = client.history.losses
        try:
            lease = await leases.grant(client, ttl_s)
            # of this attempt: a key with the lease of an earlier one ends with that
            value = records.LeaderRecord(name=name, term=uuid.uuid4().hex).encoded()
            revision = await _try(client, layout, value, lease)
            tried(None)
            if revision:
                return _Won(layout.leader, value, revision, lease, losses)
            await lease.revoke()
            await asyncio.sleep(_LOST_S)  # until the mirror has the winner
        except (StoreUnavailable, LeaseGone) as problem:
            tried(problem if isinstance(problem, StoreUnavailable) else None)
            _log.warning("this controller could not try to lead", extra={"error": problem})
            await asyncio.sleep(_PAUSE_S)


async def _try(client: Client, layout: Keys, value: bytes, lease: Lease) -> int:
    """Make the leader's key; returns its create revision, 0 if another one leads."""
    response = await writes.commit(
        client,
        [writes.absent(layout.leader)],
        [writes.put(layout.leader, value, lease.id)],
        [writes.get(layout.leader)],
        what="this controller cannot lead",
    )
    if response.succeeded:
        return response.header.revision
    present = writes.read(response, 0)
    own = present is not None and present.value == value  # of an attempt whose answer was lost
    return present.create_revision if own and present else 0


async def _keep(won: Term, lease: Lease, mirror: Mirror) -> None:
    """End the term with its lease, with the store's history, or when another leader is seen."""

    async def other_seen() -> None:
        await mirror.until(lambda: mirror.revision >= won.revision)
        await mirror.until(lambda: mirror.leader != won.revision)

    endings = (lease.keep(), other_seen(), won.history_lost())
    parts = [asyncio.create_task(each) for each in endings]
    try:
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    finally:
        won.end()
        for each in parts:
            await _cancelled(each)


async def _is_seen(won: Term, mirror: Mirror) -> bool:
    """Wait until the mirror has the term's beginning; False if it ended before."""
    seeing = asyncio.create_task(mirror.until(lambda: mirror.revision >= won.revision))
    losing = asyncio.create_task(won.lost())
    try:
        await asyncio.wait((seeing, losing), return_when=asyncio.FIRST_COMPLETED)
        return won.is_held
    finally:
        await _cancelled(seeing)
        await _cancelled(losing)


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
