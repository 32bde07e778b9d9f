"""What all services of the central controller share: changes as operations, reads, and who leads.

A change outlives its caller, one at a time per name or id, and a retry joins it (`crust.operations`). A read is sent
and forgotten. Neither is begun by a controller that does not lead.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from crust import errors, operations, pool_ids
from crust.cluster.central import routing
from crust.cluster.central.create import VolumePlacement
from crust.cluster.central.listing import ClusterLists
from crust.cluster.central.names import Names, NameUsedInOtherPool
from crust.cluster.central.routing import Router
from crust.cluster.central.survey import Survey
from crust.cluster.methods import BY_NAME
from crust.cluster.protocol import Leadership, LeadershipLost
from crust.rpc.messages.requests import needs_state

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


_NOTHING_STANDS = (
    errors.InvalidRequest,
    errors.Unsupported,
    errors.OutOfRange,
    errors.Exhausted,
    errors.NotFound,
)
"""Final answers of a node to the first attempt of a name, which leave nothing."""


class VolumesOnSeveralNodes(errors.NotReady):
    """Volumes of several pools are to be in one group snapshot (CSI: FAILED_PRECONDITION)."""

    def __init__(self, pools: Sequence[str]) -> None:
        super().__init__(
            "the volumes cannot be in one group snapshot",
            why=f"they are in the pools {', '.join(pools)}, and no moment is the same on two nodes",
            hint="make one group for each node",
        )


@dataclass(slots=True)
class ClusterCalls:
    """The calls of one controller.

    A change is an operation of what it is about: an identical call joins it, another one gets ABORTED, and it goes on
    after its caller has left, so that a retry meets it and not a second request beside the first.
    """

    router: Router
    names: Names
    placement: VolumePlacement
    lists: ClusterLists
    survey: Survey
    running: operations.KeyedOperations
    term: Leadership | None = None

    @property
    def leads(self) -> bool:
        """Whether this controller leads."""
        return self.term is not None and self.term.is_held

    def check(self, method: str) -> None:
        """Raise why this controller does not lead, unless the method needs nothing of the cluster: what keeps it from
        the store, or `LeadershipLost`.
        """
        if needs_state(method) and not self.leads:
            problem = self.router.store.problem() or LeadershipLost()
            raise problem.with_traceback(None)  # one that lasts is raised for each call

    async def change(self, name: str, request: Message, context: Context) -> Any:
        """Route a change by its volume's, snapshot's or group's id."""
        pool_id = routing.pool_of(_id_of(request))
        return await self.operation(
            name, request, context, lambda: self.router.call(pool_id, name, request)
        )

    async def operation(
        self, name: str, request: Message, context: Context, work: Callable[[], Awaitable[T]]
    ) -> T:
        """Run `work` as the operation of what the request is about."""
        method = BY_NAME[name]
        return await self.running.run(
            method.subject(request),
            name,
            routing.identity(method, request),
            work,
            limit_s=method.limit_s,
            left_s=context.time_remaining(),
        )

    async def removal(
        self,
        name: str,
        request: Message,
        context: Context,
        *,
        key: str = "",
        members: Iterable[str] = (),
    ) -> None:
        """Route what removes something, then forget its name; of a retired pool all is gone already.

        `members` are the ids of what goes with it: an earlier version has recorded them.
        """
        try:
            pool_id = routing.pool_of(_id_of(request))
        except routing.NotInThisCluster:
            return

        async def work() -> None:
            with contextlib.suppress(routing.PoolRetired):
                await self.router.call(pool_id, name, request)
            for each in members:
                if pool_ids.pool_of(each) == pool_id:
                    await self.survey.forget_if_gone(pool_id, pool_ids.key_of(each))
            await self.names.forget(key, pool_id)

        await self.operation(name, request, context, work)

    async def copy(
        self, name: str, kind: str, request: Any, sources: Sequence[str], context: Context
    ) -> Any:
        """Route a snapshot or group to its sources' pool. Raises `VolumesOnSeveralNodes`, `NameUsedInOtherPool`."""
        pools = sorted({routing.pool_of(each) for each in sources})
        if len(pools) > 1:
            raise VolumesOnSeveralNodes(pools)

        async def work() -> Any:
            self.router.find(pools[0])
            is_new = await self._record_copy(kind, request.name, pools[0])
            try:
                return await self.router.call(pools[0], name, request)
            except _NOTHING_STANDS:
                if is_new:  # an earlier attempt may have made it, whatever is answered to this one
                    await self.names.forget(pool_ids.name_key(kind, request.name), pools[0])
                raise

        return await self.operation(name, request, context, work)

    async def _record_copy(self, kind: str, name: str, pool_id: str) -> bool:
        """Record the name; whether no attempt went to the pool before."""
        key = pool_ids.name_key(kind, name)
        known = await self.names.pool_of(key)
        if known not in ("", pool_id):
            if await self.names.stands(known, key):
                raise NameUsedInOtherPool(kind, name, known)
            await self.names.forget(key, known)
        await self.names.record(key, pool_id)
        return known != pool_id

    async def read(self, name: str, pool_id: str, request: Message, context: Context) -> Any:
        """Route a call that only reads."""
        return await self.router.call(pool_id, name, request, left_s=left_s(context))


def left_s(context: Context) -> float | None:
    """What is left of the caller's time, with a part kept for the answer."""
    left: float | None = context.time_remaining()  # its stub says that there is always one
    return None if left is None else left * operations.ANSWER_AT


def _id_of(request: Any) -> str:
    """The id in the request of a change, which has one of these fields."""
    names = ("volume_id", "snapshot_id", "group_snapshot_id")
    return next(str(getattr(request, each)) for each in names if hasattr(request, each))
