"""In which pool a name is, so that no name is created in two.

The record is written before the first create is sent, and removed when nothing of that name stands any more: after a
delete, or after a final answer that leaves nothing. While it is there every create of the name goes to that pool,
whatever the topology or the capacities are by then. A pool of a retired node has nothing: such a record is removed.

The records can be lost with the store, or not be there yet: a pool that had volumes before it joined. So each pool is
surveyed once (`survey`): what it has is recorded, and then that it was surveyed. A name without a record is asked for
in every pool that was not surveyed yet, and while one of those is away no new name is created: it could be there. In
an empty store it is not even known which pools there are: the first term in it creates no new name before the nodes
had time to announce themselves.

A store can also be restored from a backup. It lacks the names that were created since, and says that their pools were
surveyed. So the record of a survey names the process of the pool's node, and counts no more for another
one: a node that has run through a restore says so by another count, and then all pools are surveyed again, those of
nodes that are away too, as in an empty store. Each term compares the records with the nodes that are connected before
it creates a new name; and while a pool is not surveyed, a record counts for a name only if its volume stands there.
"""

import asyncio
import logging
import time

from google.protobuf.message import Message

from crust import errors
from crust.cluster.central.routing import Router
from crust.wire.csi.v1 import csi_pb2

SETTLE_S = 40.0
"""How long the nodes have to announce themselves in an empty store: longer than any lease, and than an agent's
repetition."""

_SETTLED = "settled"
_ASK = {
    "volume": "ControllerGetVolume",
    "snapshot": "GetSnapshot",
    "group": "GetVolumeGroupSnapshot",
}

_log = logging.getLogger(__name__)


class PoolNotSurveyed(errors.PeerUnavailable):
    """A pool's names are not known yet, and its node is not connected."""

    def __init__(self, pool_id: str, node_id: str) -> None:
        super().__init__(
            "no volume of a new name can be created",
            why=f"the names in the pool {pool_id} are not known, and its node {node_id} is not connected",
            hint="connect the node; if it is gone for good, run `crust cluster retire`",
        )
        self.pool_id = pool_id


class StoreIsNew(errors.PeerUnavailable):
    """The store is empty or was restored, and the nodes may not have announced themselves yet."""

    def __init__(self, settle_s: float) -> None:
        super().__init__(
            "no volume of a new name can be created yet",
            why="the store of the cluster is new, or was restored, and not all nodes may have announced themselves",
            hint=f"wait for {settle_s:g} s after the start; if the store was lost, connect all nodes first",
        )


class NameUsedInOtherPool(errors.Conflict):
    """The name of a snapshot or group is used in another pool."""

    def __init__(self, kind: str, name: str, pool_id: str) -> None:
        super().__init__(
            f"the {kind} {name!r} exists already",
            why=f"it is in the pool {pool_id}, and its source is in another one",
            hint="choose another name, or delete it first",
        )
        self.name = name


class Names:
    """The records of one term: what is remembered here is true as long as this controller leads."""

    def __init__(self, router: Router, *, settle_s: float = SETTLE_S) -> None:
        self._router = router
        self._store = router.store
        self.settle_s = settle_s
        self._is_settled = False
        self._is_new = False
        self._surveyed: dict[str, str] = {}
        """By pool, the node's process at its survey; that of a pool whose node is away was not compared."""
        self._compared = asyncio.Event()
        self._compared.set()
        self._settles_s = 0.0

    def begin(self) -> None:
        """A term begins: what is recorded is not believed before `are_compared`."""
        self._compared.clear()
        self._settles_s = time.monotonic() + self.settle_s

    def are_compared(self) -> None:
        """The records of surveys were compared with the nodes that are connected, as far as these answer."""
        self._compared.set()

    async def pool_of(self, key: str) -> str:
        """The pool that has `key`, or may have it; empty for a new one.

        Raises `StoreIsNew`, `PoolNotSurveyed`, `StoreUnavailable`, and what a node that is asked answers.
        """
        recorded = await self._store.placement(key)
        if recorded in self._store.retired_pools():
            await self._store.unplace(key, recorded)
            recorded = ""
        if recorded and (not await self._unsurveyed() or await self.stands(recorded, key)):
            return recorded
        found = await self._unrecorded(key)
        if recorded and found:  # deleted there, and created again, since a backup
            await self._store.unplace(key, recorded)
        return found or recorded

    async def record(self, key: str, pool_id: str) -> str:
        """Record the pool unless one is recorded; return the recorded one."""
        return await self._store.place(key, pool_id)

    async def forget(self, key: str, pool_id: str) -> None:
        """Nothing of that name stands in the pool."""
        if key:
            await self._store.unplace(key, pool_id)

    async def stands(self, pool_id: str, key: str) -> bool:
        """Whether the pool has a volume, snapshot or group of that name. Raises what its node answers."""
        kind, _, digest = key.partition("-")
        asked: Message
        if kind == "volume":
            asked = csi_pb2.ControllerGetVolumeRequest(volume_id=f"{pool_id}-{digest}")
        elif kind == "snapshot":
            asked = csi_pb2.GetSnapshotRequest(snapshot_id=f"{pool_id}-snap-{digest}")
        else:
            group_id = f"{pool_id}-group-{digest}"
            asked = csi_pb2.GetVolumeGroupSnapshotRequest(group_snapshot_id=group_id)
        try:
            await self._router.call(pool_id, _ASK[kind], asked)
        except errors.NotFound:
            return False
        except errors.InvalidRequest:
            if kind != "group":
                raise
            # it stands: whoever asks for a group has to name its members, and no record has them
        return True

    @property
    def problem(self) -> StoreIsNew | None:
        """What keeps new names from being created, as far as `look` has found it."""
        return StoreIsNew(self.settle_s) if self._is_new and not self._is_settled else None

    async def look(self) -> None:
        """Look whether the store is new. Raises `StoreUnavailable`."""
        if not self._is_settled:
            self._is_settled = bool(await self._store.placement(_SETTLED))
            self._is_new = not self._is_settled

    async def settle(self) -> None:
        """Mark the store as in use, once the nodes had time to announce themselves."""
        if self._is_settled or time.monotonic() < self._settles_s:
            return
        try:
            await self._store.place(_SETTLED, _SETTLED)
        except errors.PeerUnavailable as error:
            _log.info("the store is not marked as in use yet", extra={"error": error})
        else:
            self._is_settled = True

    def node_process(self, pool_id: str) -> str:
        """Who speaks for the pool now; empty while its node is away. It is of now if the node has just answered."""
        return self._node_processes().get(pool_id, "")

    async def is_surveyed(self, pool_id: str) -> bool:
        """Whether all that the pool has is recorded. Raises `StoreUnavailable`, `StoreIsNew`."""
        await self._compared.wait()
        return await self.compare(pool_id, self.node_process(pool_id))

    async def compare(self, pool_id: str, node_process: str) -> bool:
        """Whether the pool was surveyed, for all that `node_process` knows. Raises as `is_surveyed`."""
        if self._is_known(pool_id, node_process):
            return True
        recorded = await self._store.placement(_mark(pool_id))
        if _is_denied(recorded, node_process):
            await self._forget_surveys(pool_id, recorded, node_process)
            raise StoreIsNew(self.settle_s)
        if not recorded or node_process not in ("", recorded):
            return False
        self._surveyed[pool_id] = recorded
        return True

    async def mark_surveyed(self, pool_id: str, node_process: str) -> None:
        """All that the pool has is recorded, says `node_process`. Raises as `record`."""
        recorded = await self._store.place(_mark(pool_id), node_process)
        if recorded != node_process:
            await self._store.unplace(_mark(pool_id), recorded)
            await self._store.place(_mark(pool_id), node_process)
        self._surveyed[pool_id] = node_process

    async def _forget_surveys(self, pool_id: str, recorded: str, node_process: str) -> None:
        """The store has lost names, and nobody knows of which pools."""
        extra = {"pool_id": pool_id, "recorded": recorded, "node_process": node_process}
        _log.warning(
            "the store was restored from a backup: all pools are surveyed again", extra=extra
        )
        await self._store.unplace_all((_mark(""), _SETTLED))
        self._surveyed.clear()
        self._is_settled, self._is_new = False, True
        self._settles_s = time.monotonic() + self.settle_s

    def _node_processes(self) -> dict[str, str]:
        return {each.pool_id: each.node_process for each in self._router.connected()}

    def _is_known(self, pool_id: str, node_process: str) -> bool:
        known = self._surveyed.get(pool_id, "")
        return known != "" and node_process in ("", known)

    async def _unsurveyed(self) -> list[str]:
        """The pools that may have names without a record. Raises as `is_surveyed`."""
        await self._compared.wait()
        processes = self._node_processes()
        pools = [
            each
            for each in self._router.pools()
            if not self._is_known(each, processes.get(each, ""))
        ]
        # those that can deny what is recorded of the others are first
        pools.sort(key=lambda each: each not in processes)
        return [each for each in pools if not await self.compare(each, processes.get(each, ""))]

    async def _unrecorded(self, key: str) -> str:
        """The pool that has a volume without a record of it."""
        await self.look()
        if self.problem is not None:
            raise self.problem
        for pool_id in await self._unsurveyed():
            if await self._was_there(pool_id, key):
                return pool_id
        return ""

    async def _was_there(self, pool_id: str, key: str) -> bool:
        try:
            self._router.find(pool_id)
        except errors.PeerUnavailable as error:
            node_id = self._store.known_pools().get(pool_id, "")
            raise PoolNotSurveyed(pool_id, node_id) from error
        return await self.stands(pool_id, key)


def _mark(pool_id: str) -> str:
    return f"surveyed-{pool_id}"


def _is_denied(recorded: str, node_process: str) -> bool:
    """Whether the process that was surveyed says that the store has lost its history since."""
    same = recorded.rpartition("-")[0] == node_process.rpartition("-")[0] != ""
    return same and recorded != node_process
