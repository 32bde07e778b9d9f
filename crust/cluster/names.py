"""In which pool a name is, so that no name is created in two.

The record is written before the first create is sent, and removed when nothing of that name stands any more: after a
delete, or after a final answer that leaves nothing. While it is there every create of the name goes to that pool,
whatever the topology or the capacities are by then. A pool of a retired node has nothing: such a record is removed.

The records can be lost with the store, or not be there yet: a pool that had volumes before it joined. So each pool is
surveyed once: what it has is recorded, and then that it was surveyed. A name without a record is asked for in every
pool that was not surveyed yet, and while one of those is away no new name is created: it could be there. In an empty
store it is not even known which pools there are: the first term in it creates no new name before the nodes had time
to announce themselves.
"""

import asyncio
import logging
import time

from google.protobuf.message import Message

from crust import errors, pool_ids
from crust.cluster.routing import Router
from crust.wire.csi.v1 import csi_pb2

PAGE = 500
AT_ONCE = 32
SURVEY_EVERY_S = 1.0
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


class NamesUnknown(errors.PeerUnavailable):
    """A pool's names are not known yet, and its node is not connected."""

    def __init__(self, pool_id: str, node_id: str) -> None:
        super().__init__(
            "no volume of a new name can be created",
            why=f"the names in the pool {pool_id} are not known, and its node {node_id} is not connected",
            hint="connect the node; if it is gone for good, run `crust cluster retire`",
        )
        self.pool_id = pool_id


class StoreIsNew(errors.PeerUnavailable):
    """The store is empty, and the nodes may not have announced themselves yet."""

    def __init__(self, settle_s: float) -> None:
        super().__init__(
            "no volume of a new name can be created yet",
            why="the store of the cluster is new, and not all nodes may have announced themselves",
            hint=f"wait for {settle_s:g} s after the start; if the store was lost, connect all nodes first",
        )


class NameElsewhere(errors.Conflict):
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
        self._settle_s = settle_s
        self._is_settled = False
        self._surveyed: set[str] = set()

    async def pool_of(self, key: str) -> str:
        """The pool that has `key`, or may have it; empty for a new one.

        Raises `StoreIsNew`, `NamesUnknown`, `StoreUnavailable`, and what a node that is asked answers.
        """
        recorded = await self._store.placement(key)
        if recorded in self._store.retired_pools():
            await self._store.unplace(key, recorded)
            recorded = ""
        return recorded or await self._unrecorded(key)

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
        return True

    async def keep_surveying(self) -> None:
        """Survey pools when they are connected, until cancelled."""
        settled_s = time.monotonic() + self._settle_s
        while True:
            if not self._is_settled and time.monotonic() >= settled_s and self._router.connected():
                await self._settle()
            for pool_id in [each.pool_id for each in self._router.connected() if each.is_ready]:
                try:
                    await self._survey(pool_id)
                except errors.PeerUnavailable as error:
                    _log.info("a pool cannot be surveyed yet", extra={"error": error})
                except errors.CrustError as error:
                    _log.warning("a pool cannot be surveyed", extra={"error": error})
            await asyncio.sleep(SURVEY_EVERY_S)

    async def _unrecorded(self, key: str) -> str:
        """The pool that has a volume without a record of it."""
        if not self._is_settled:
            self._is_settled = bool(await self._store.placement(_SETTLED))
        if not self._is_settled:
            raise StoreIsNew(self._settle_s)
        for pool_id in self._router.pools():
            if not await self._is_surveyed(pool_id) and await self._was_there(pool_id, key):
                return pool_id
        return ""

    async def _settle(self) -> None:
        try:
            await self._store.place(_SETTLED, _SETTLED)
        except errors.PeerUnavailable as error:
            _log.info("the store is not marked as in use yet", extra={"error": error})
        else:
            self._is_settled = True

    async def _was_there(self, pool_id: str, key: str) -> bool:
        try:
            self._router.find(pool_id)
        except errors.PeerUnavailable as error:
            node_id = self._store.known_pools().get(pool_id, "")
            raise NamesUnknown(pool_id, node_id) from error
        return await self.stands(pool_id, key)

    async def _is_surveyed(self, pool_id: str) -> bool:
        if pool_id not in self._surveyed and await self._store.placement(_mark(pool_id)):
            self._surveyed.add(pool_id)
        return pool_id in self._surveyed

    async def _survey(self, pool_id: str) -> None:
        if await self._is_surveyed(pool_id):
            return
        count = await self._record_volumes(pool_id) + await self._record_snapshots(pool_id)
        await self._store.place(_mark(pool_id), pool_id)
        self._surveyed.add(pool_id)
        _log.info("pool surveyed", extra={"pool_id": pool_id, "names": count})

    async def _record_volumes(self, pool_id: str) -> int:
        count, token = 0, ""
        while True:
            asked = csi_pb2.ListVolumesRequest(max_entries=PAGE, starting_token=token)
            page = await self._router.call(pool_id, "ListVolumes", asked)
            await self._record_all(pool_id, [each.volume.volume_id for each in page.entries])
            count, token = count + len(page.entries), page.next_token
            if not token:
                return count

    async def _record_snapshots(self, pool_id: str) -> int:
        count, token = 0, ""
        while True:
            asked = csi_pb2.ListSnapshotsRequest(max_entries=PAGE, starting_token=token)
            page = await self._router.call(pool_id, "ListSnapshots", asked)
            await self._record_all(pool_id, [each.snapshot.snapshot_id for each in page.entries])
            count, token = count + len(page.entries), page.next_token
            if not token:
                return count

    async def _record_all(self, pool_id: str, ids: list[str]) -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(text: str) -> None:
            async with places:
                recorded = await self._store.place(pool_ids.key_of(text), pool_id)
            if recorded != pool_id:
                extra = {"volume_id": text, "other_pool": recorded}
                _log.error("one name is in two pools; delete one of the two by hand", extra=extra)

        await asyncio.gather(*(one(each) for each in ids))


def _mark(pool_id: str) -> str:
    return f"surveyed-{pool_id}"
