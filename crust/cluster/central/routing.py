"""Sends a CSI call to the node that has the pool, and gives its answer as if it had been called here.

A request is the message without what is secret: its marked fields, which the controller part of a driver for local
pools does not need, its mount flags, and what a kubelet adds to contexts. What the node answered with is raised as
the error that it is, with its own name and sentence.

A call ends when its node answers, when nobody would wait for it any more, or soon after its node is not connected. In
the last two cases it is not known what stands, and the node may carry the request out later: it does so in the order
in which requests were put, so a retry gets the answer to both.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from crust import errors, logs, pool_ids
from crust.cluster.methods import BY_NAME, Method
from crust.cluster.protocol import Announcement, Answer, ControllerSide, NodeAbsent, Request
from crust.rpc import status
from crust.rpc.messages import redaction

LOOK_EVERY_S = 2.0
"""How soon a call ends whose node is gone."""
FREED_LATELY_S = 5.0
"""Some times the least time between two announcements of a node."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_KUBERNETES = "csi.storage.k8s.io/"


class NotInThisCluster(errors.NotFound):
    """An id names no pool, so no node can have what it stands for."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text[:128]!r} does not exist", why="its id names no pool")


class PoolRetired(errors.NotFound):
    """The node that had the pool was retired."""

    def __init__(self, pool_id: str) -> None:
        super().__init__(
            f"the pool {pool_id} is gone",
            why="its node was retired",
            hint="volumes of it can be deleted, and nothing else",
        )
        self.pool_id = pool_id


class PoolAnnouncedTwice(errors.PeerUnavailable):
    """Two nodes say that they have the same pool."""

    def __init__(self, pool_id: str, nodes: tuple[str, ...]) -> None:
        super().__init__(
            f"the pool {pool_id} is not served",
            why=f"the nodes {', '.join(nodes)} both announce it, so one of them has a copy",
            hint="stop the driver of the node that has the copy",
        )
        self.pool_id = pool_id


class Router:
    """Sends calls to nodes. `look_every_s` is how often a call looks whether its node is still connected."""

    def __init__(
        self,
        store: ControllerSide,
        *,
        look_every_s: float = LOOK_EVERY_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self._look_every_s = look_every_s
        self._clock = clock
        self._freed_s: dict[str, float] = {}
        """By pool: when its node answered last that something is gone."""

    def pools(self) -> tuple[str, ...]:
        """All pools that there are, connected or not, in order."""
        announced = {each.pool_id for each in self.store.nodes().values()}
        return tuple(
            sorted((announced | set(self.store.known_pools())) - self.store.retired_pools())
        )

    def connected(self) -> tuple[Announcement, ...]:
        """What the connected nodes announce, without pools that are retired or announced twice."""
        pools: dict[str, list[Announcement]] = {}
        for each in self.store.nodes().values():
            pools.setdefault(each.pool_id, []).append(each)
        retired = self.store.retired_pools()
        return tuple(
            said[0] for pool_id, said in pools.items() if len(said) == 1 and pool_id not in retired
        )

    def freed_lately(self) -> frozenset[str]:
        """The pools whose nodes may not have announced yet what a call through here has freed."""
        since_s = time.monotonic() - FREED_LATELY_S
        return frozenset(pool_id for pool_id, at_s in self._freed_s.items() if at_s >= since_s)

    def find(self, pool_id: str) -> Announcement:
        """The node that has the pool. Raises `PoolRetired`, `PoolAnnouncedTwice`, `NodeAbsent`."""
        if pool_id in self.store.retired_pools():
            raise PoolRetired(pool_id)
        said = [each for each in self.store.nodes().values() if each.pool_id == pool_id]
        if len(said) > 1:
            raise PoolAnnouncedTwice(pool_id, tuple(sorted(each.node_id for each in said)))
        if not said:
            raise NodeAbsent(pool_id, self.store.known_pools().get(pool_id, ""))
        return said[0]

    async def call(
        self, pool_id: str, name: str, request: Message, *, left_s: float | None = None
    ) -> Any:
        """The response of the pool's node to the call `name`, within `left_s`.

        Raises as `find`, before anything is sent; what the node answered; `NodeAbsent` when it has not;
        `StoreUnavailable`, `LeadershipLost`.
        """
        method = BY_NAME[name]
        limit_s = method.limit_s if left_s is None else min(left_s, method.limit_s)
        node_id = self.find(pool_id).node_id
        sent = Request(
            request_id=_request_id(),
            method=method.path,
            message=_without_secrets(request).SerializeToString(deterministic=True),
            deadline_unix_s=self._clock() + limit_s,
            pool_id=pool_id,
        )
        answer = await self._ask(node_id, sent, limit_s)
        if answer.code:
            raise _error_of(answer)
        if method.frees:
            self._freed_s[pool_id] = time.monotonic()
        return method.response.FromString(answer.response)

    async def _ask(self, node_id: str, request: Request, limit_s: float) -> Answer:
        ends_s = time.monotonic() + limit_s
        while True:
            left_s = ends_s - time.monotonic()
            try:
                return await self.store.ask(
                    node_id, request, min(self._look_every_s, max(left_s, 0.001))
                )
            except NodeAbsent:
                if left_s <= self._look_every_s or node_id not in self.store.nodes():
                    raise NodeAbsent(request.pool_id, node_id) from None


def pool_of(text: str) -> str:
    """The pool of an id. Raises `NotInThisCluster`."""
    pool_id = pool_ids.pool_of(text)
    if not pool_id:
        raise NotInThisCluster(text)
    return pool_id


def identity(method: Method, request: Message) -> bytes:
    """What makes two requests the same: their content without secrets."""
    return method.path.encode() + _without_secrets(request).SerializeToString(deterministic=True)


def _request_id() -> str:
    fields = logs.context.get() or {}
    return f"{fields.get('request_id', 'own')[:40]}-{secrets.token_hex(8)}"


def _without_secrets(request: Message) -> Message:
    kept = type(request)()
    kept.CopyFrom(request)
    _clear(kept)
    return kept


def _clear(message: Message) -> None:
    for field, value in message.ListFields():
        if redaction.is_marked(field) or field.name == "mount_flags":
            message.ClearField(field.name)
        elif field.name == "volume_context":
            for key in [each for each in value if each.startswith(_KUBERNETES)]:
                del value[key]
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value if field.is_repeated else (value,):
                _clear(each)


def _error_of(answer: Answer) -> errors.CrustError:
    """The error that the node answered with."""
    details = (
        grpc.aio.Metadata((status.DETAILS_KEY, answer.response))
        if answer.response
        else grpc.aio.Metadata()
    )
    return status.to_error(
        grpc.aio.AioRpcError(
            _CODES.get(answer.code, grpc.StatusCode.UNKNOWN),
            grpc.aio.Metadata(),
            details,
            answer.message,
        )
    )
