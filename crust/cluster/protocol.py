"""What a central controller and the nodes need of a shared store: announcements, requests with answers, leadership.

The store holds intents and announcements; the pools are the truth. An empty store is filled again by the nodes, and
an answer that is lost is asked for again: each request is a CSI call, which is idempotent by CSI's own rules. No
secret of a volume is ever written to the store.

A request is answered at least once and carried out one at a time per volume by the node. An announcement lives as
long as its node renews it; a controller counts a node without one as absent, and never decides by that alone that the
node's volumes are gone.

A placement is recorded before a volume is created, so that a name is never created in two pools. It says where to
ask; whether the volume exists is the pool's to say.

The protocols are narrow on purpose: nothing here speaks of keys, leases or transactions, so that another store can
take etcd's place.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from crust import errors


class StoreUnavailable(errors.PeerUnavailable):
    """The store cannot be asked, or has no quorum; whether a change took place is unknown."""

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        super().__init__(what, why=why, hint=hint or "see that the store runs and has quorum")


class NodeAbsent(errors.PeerUnavailable):
    """The node that has the pool is not announced."""

    def __init__(self, pool_id: str, node: str = "") -> None:
        why = f"node {node} is not connected, or did not answer in time"
        super().__init__(
            f"the pool {pool_id} is not served",
            why=why if node else "no node that is known has it",
            hint="wait for the node, or repair it; its volumes are kept",
        )
        self.pool_id = pool_id
        self.node = node


class LeadershipLost(errors.PeerUnavailable):
    """Another controller leads."""

    def __init__(self) -> None:
        super().__init__(
            "this controller does not lead",
            why="another one was elected, or the store cannot be reached",
            hint="the call is retried at the leader",
        )


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a node says of itself and its pool while it is connected. Sizes are bytes."""

    node_id: str
    pool_id: str
    segments: Mapping[str, str]
    """The node's topology, as NodeGetInfo answers."""
    capacity_bytes: int
    """How much more can be created."""
    maximum_bytes: int
    """The largest volume that can be created."""
    volumes: int
    max_volumes: int
    """0 for no limit."""
    is_ready: bool
    """Whether the pool is served."""
    boot: str
    """Differs after each start of the node's process, and after each time that the pool was away."""
    extra: Mapping[str, str] = field(default_factory=dict)
    restored: int = 0
    """How often the node's process found that the store had lost its latest history. `NodeSide` sets it."""

    @property
    def node_process(self) -> str:
        """Another one when the node cannot say, or denies, that the store has all that the node knows of."""
        return f"{self.boot}-{self.restored}"


@dataclass(frozen=True, slots=True)
class Request:
    """A CSI call for a node's pool: the method's full name, and the encoded message without secrets."""

    request_id: str
    method: str
    message: bytes
    deadline_unix_s: float = 0
    """When nobody waits any more; 0 for never. The node may skip an older one."""
    pool_id: str = ""
    """The pool that the call is for; a node that has another one by now does not carry it out."""
    delivery: int = field(default=0, compare=False)
    """Set by the store for the node: an answer is for this asking alone, not for a later one of the same id."""
    has_returned: bool = field(default=False, compare=False)
    """Set by the store for the node: it is older than what this process has seen, or than the process, and none that
    it has still to answer. It may have been carried out long ago, and what it names may be another volume by now."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A status code of gRPC by number, its message, and the encoded response.

    With another code than 0 `response` has the details of the status, if there are any (google.rpc.Status).
    """

    code: int
    message: str = ""
    response: bytes = b""


class NodeSide(Protocol):
    """The store as one node sees it; it reaches nothing of other nodes."""

    async def announce(self, announcement: Announcement) -> None:
        """Be connected with this announcement, or replace the one before; it ends with the node's connection.

        Raises `StoreUnavailable`.
        """
        ...

    def requests(self) -> AsyncIterator[Request]:
        """Requests for this node that have no answer, the oldest first, for ever: reconnects by itself.

        After a reconnect a request may come again. When requests come, what the node announces was compared with
        what is in the store.
        """
        ...

    async def answer(self, request: Request, answer: Answer) -> None:
        """Answer a request; one that nobody waits for any more is dropped. Raises `StoreUnavailable`."""
        ...


class Leadership(Protocol):
    """A term as leader."""

    @property
    def is_held(self) -> bool:
        """Whether this controller leads still, by its own clock since the last renewal it sent."""
        ...

    async def lost(self) -> None:
        """Return when the term has ended."""
        ...


class ControllerSide(Protocol):
    """The store as a controller sees it."""

    async def ready(self, timeout_s: float) -> None:
        """Wait until it is known what is in the store. Raises `StoreUnavailable`."""
        ...

    def problem(self) -> StoreUnavailable | None:
        """Why the store cannot be used now, or what is in it is not known. Does not block."""
        ...

    def nodes(self) -> Mapping[str, Announcement]:
        """The connected nodes by node id, as far as is known now. Does not block."""
        ...

    def known_pools(self) -> Mapping[str, str]:
        """The node id of each pool that was ever announced and not retired. Does not block."""
        ...

    def retired_pools(self) -> frozenset[str]:
        """The pools of retired nodes; they stay retired when they are announced again. Does not block."""
        ...

    async def ask(self, node_id: str, request: Request, timeout_s: float) -> Answer:
        """Put the request to the node and wait for its answer.

        The same `request_id` again joins the request that is under way, also after a restart of the controller.
        Raises `StoreUnavailable`, and `NodeAbsent` when the node does not answer in time.
        """
        ...

    async def place(self, key: str, pool_id: str) -> str:
        """Record that what is called `key` belongs to a pool, unless a pool is recorded; return the recorded one.

        At most 128 letters, digits and "-" in `key`. The record stays until `unplace`, whoever leads. Of two
        controllers, or two calls, with different pools both get the same answer. Raises `StoreUnavailable`, after
        which either may be recorded, and `LeadershipLost`, after which nothing was.
        """
        ...

    async def placement(self, key: str) -> str:
        """The pool that is recorded for `key`, empty if there is none. It reads what was written last.

        Raises `StoreUnavailable`.
        """
        ...

    async def unplace(self, key: str, pool_id: str) -> None:
        """Remove the record of `key` if it names `pool_id`; else nothing. Raises as `place`."""
        ...

    async def unplace_all(self, beginnings: Sequence[str]) -> None:
        """Remove, in one moment, the records of all keys that begin with one of these. Raises as `place`."""
        ...

    async def placements(self, after: str, limit: int) -> tuple[tuple[str, str], ...]:
        """At most `limit` keys with their pools, in the order of the keys, those greater than `after`.

        Raises `StoreUnavailable`.
        """
        ...

    async def retire(self, node_id: str) -> tuple[str, ...]:
        """Forget a node that is gone for good, and keep for good that its pools are retired; returns these.

        Whether it may be is decided by what is in the store in the moment in which it is written. Needs no
        leadership: an operator does it. A repetition changes nothing. Raises as `retirement.of_node`,
        `StoreUnavailable`.
        """
        ...

    async def retire_pool(self, pool_id: str) -> None:
        """Keep for good that a pool is retired whose node is not known any more, as `retire` does.

        Raises as `retirement.check_pool`, `StoreUnavailable`.
        """
        ...

    def lead(self, name: str) -> AbstractAsyncContextManager[Leadership]:
        """Wait until this controller leads; its requests are refused by the store after its term has ended."""
        ...
