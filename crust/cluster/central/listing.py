"""Lists over all pools, in one order, with one token; and capacity over all pools.

Ids begin with their pool, so the pools are read one after the other in the order of their ids, and the last id of a
page is the token for the next, as it is in one pool: nothing is kept between two calls.

One rule holds for all lists: nothing that stands is left out. A CO treats what is not listed as gone, and CSI has no
way to say that a list is incomplete. And one node must not make the list of all others fail: it is away if it does
not answer in a few seconds, or answers that it cannot serve its pool. So what a node that is away has is listed from
the records of the names, if its pool was surveyed, so that none is missing, and if a record has all that CSI requires
of an entry. Otherwise the list is UNAVAILABLE.

A volume's entry needs an id. The size is 0, which is CSI's "unknown", and the condition says which node is away. They
are listed as published to that node, the only one that they can be published to: external-attacher would treat an
attachment that is not listed as lost. A snapshot's entry needs the source and the time, which no record has. So that
list is UNAVAILABLE while a node is away that has snapshots, and complete without those that have none.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from crust import errors, pool_ids
from crust.cluster.central import placement
from crust.cluster.central.names import Names
from crust.cluster.central.routing import Router
from crust.cluster.protocol import ControllerSide, LeadershipLost, StoreUnavailable
from crust.rpc.messages import limits
from crust.wire.csi.v1 import csi_pb2

PAGE_MAX = 1000
"""The largest page, also without a limit in the request."""
_ASKED_MAX = 500
"""The most entries that are asked of a node at once: they must fit one answer, at 2 KiB each."""
_RECORDS = 1000
NODE_S = 5.0
"""How long a list waits for one node, and never longer than half of what is left of the caller's time."""


class _Away(Exception):
    """The node of a pool does not serve it now."""

    def __init__(self, pool_id: str, node_id: str, error: errors.PeerUnavailable) -> None:
        self.pool_id = pool_id
        self.node_id = node_id
        self.error = error


class _Records:
    """The names that are recorded, by pool; read once for a call and kind, and only if a node is away."""

    def __init__(self, store: ControllerSide, names: Names) -> None:
        self._store = store
        self._names = names
        self._keys: dict[str, dict[str, list[str]]] = {}

    async def volumes(self, away: _Away, after: str) -> list[str]:
        """The ids of the pool's volumes after that one. Raises why it is away if a record could be missing."""
        await self._check(away)
        ids = [_volume_id(away.pool_id, key) for key in await self._of("volume", away.pool_id)]
        return [each for each in ids if each > after]

    async def check_no_snapshots(self, away: _Away) -> None:
        """Raise why the pool is away unless it has no snapshot, and no group of snapshots."""
        await self._check(away)
        for kind in ("snapshot", "group"):
            if await self._of(kind, away.pool_id):
                raise away.error

    async def _check(self, away: _Away) -> None:
        if not await self._names.is_surveyed(away.pool_id):
            raise away.error

    async def _of(self, kind: str, pool_id: str) -> list[str]:
        if kind not in self._keys:
            self._keys[kind] = await self._read(f"{kind}-")
        return self._keys[kind].get(pool_id, [])

    async def _read(self, prefix: str) -> dict[str, list[str]]:
        keys: dict[str, list[str]] = {}
        after = prefix
        while True:
            rows = await self._store.placements(after, _RECORDS)
            for after, pool_id in rows:
                if not after.startswith(prefix):
                    return keys
                keys.setdefault(pool_id, []).append(after)
            if len(rows) < _RECORDS:
                return keys


def _volume_id(pool_id: str, key: str) -> str:
    return f"{pool_id}-{key.partition('-')[2]}"


class ClusterLists:
    """Reads over all pools. `has_condition`: whether health is part of a volume's entry (CSI 1.12)."""

    def __init__(self, router: Router, names: Names, *, has_condition: bool) -> None:
        self._router = router
        self._names = names
        self._has_condition = has_condition

    async def volumes(
        self, request: csi_pb2.ListVolumesRequest, left_s: float | None = None
    ) -> csi_pb2.ListVolumesResponse:
        """A page of ListVolumes, within `left_s`."""
        ask, records = self._asking(left_s), self._records()

        async def page(pool_id: str, count: int, after: str) -> tuple[Sequence[Any], str]:
            asked = csi_pb2.ListVolumesRequest(max_entries=count, starting_token=after)
            try:
                got = await ask(pool_id, "ListVolumes", asked)
            except _Away as away:
                ids = await records.volumes(away, after)
                return _absent(ids, count, self._absent_entry(away))
            return got.entries, got.next_token

        entries, token = await self._collect(
            request.max_entries, request.starting_token, page, lambda each: each.volume.volume_id
        )
        return csi_pb2.ListVolumesResponse(entries=entries, next_token=token)

    async def health(
        self, request: csi_pb2.ControllerListVolumeHealthRequest, left_s: float | None = None
    ) -> csi_pb2.ControllerListVolumeHealthResponse:
        """A page of ControllerListVolumeHealth, within `left_s`."""
        ask, records = self._asking(left_s), self._records()

        async def page(pool_id: str, count: int, after: str) -> tuple[Sequence[Any], str]:
            asked = csi_pb2.ControllerListVolumeHealthRequest(
                max_entries=count, starting_token=after
            )
            try:
                got = await ask(pool_id, "ControllerListVolumeHealth", asked)
            except _Away as away:
                ids = await records.volumes(away, after)
                return _absent(ids, count, _inaccessible(away))
            return got.entries, got.next_token

        entries, token = await self._collect(
            request.max_entries, request.starting_token, page, lambda each: each.volume_id
        )
        return csi_pb2.ControllerListVolumeHealthResponse(entries=entries, next_token=token)

    async def snapshots(
        self, request: csi_pb2.ListSnapshotsRequest, left_s: float | None = None
    ) -> csi_pb2.ListSnapshotsResponse:
        """A page of ListSnapshots, within `left_s`; one of an id, or of a source, is asked of its pool alone."""
        named = request.snapshot_id or request.source_volume_id
        only = pool_ids.pool_of(named)
        if named and only not in self._router.pools():
            return csi_pb2.ListSnapshotsResponse()
        ask, records = self._asking(left_s), self._records()

        async def page(pool_id: str, count: int, after: str) -> tuple[Sequence[Any], str]:
            asked = csi_pb2.ListSnapshotsRequest()
            asked.CopyFrom(request)
            asked.max_entries, asked.starting_token = count, after
            if named:
                got = await self._router.call(pool_id, "ListSnapshots", asked, left_s=left_s)
                return got.entries, got.next_token
            try:
                got = await ask(pool_id, "ListSnapshots", asked)
            except _Away as away:
                await records.check_no_snapshots(away)
                return (), ""
            return got.entries, got.next_token

        entries, token = await self._collect(
            request.max_entries,
            request.starting_token,
            page,
            lambda each: each.snapshot.snapshot_id,
            (only,) if named else None,
        )
        return csi_pb2.ListSnapshotsResponse(entries=entries, next_token=token)

    async def capacity(self, request: csi_pb2.GetCapacityRequest) -> csi_pb2.GetCapacityResponse:
        """The sum over the connected pools of the topology, and the largest volume that one of them takes.

        One of them is asked, for what only its driver knows: whether it has such volumes at all, and their least
        size. The others' numbers are those that they announced. A pool that is away has no capacity.
        """
        wanted = dict(request.accessible_topology.segments)
        here = [
            each
            for each in self._router.connected()
            if each.is_ready and placement.is_in(each.segments, wanted)
        ]
        if not here:
            return _capacity(0, 0, 0)
        asked_node = max(here, key=lambda each: (each.maximum_bytes, each.pool_id))
        asked = csi_pb2.GetCapacityRequest()
        asked.CopyFrom(request)
        asked.ClearField("accessible_topology")
        asked.accessible_topology.segments.update(asked_node.segments)
        got: csi_pb2.GetCapacityResponse = await self._router.call(
            asked_node.pool_id, "GetCapacity", asked
        )
        if not got.minimum_volume_size.value:
            return _capacity(0, 0, 0)
        others = [each for each in here if each is not asked_node]
        return _capacity(
            got.available_capacity + sum(each.capacity_bytes for each in others),
            max([got.maximum_volume_size.value, *(each.maximum_bytes for each in others)]),
            got.minimum_volume_size.value,
        )

    async def _collect(
        self,
        max_entries: int,
        token: str,
        page: Callable[[str, int, str], Any],
        id_of: Callable[[Any], str],
        pools: Sequence[str] | None = None,
    ) -> tuple[list[Any], str]:
        """The entries of all pools after `token`, at most one page, and the token for the next."""
        if max_entries < 0:
            raise limits.NegativeMaxEntries(max_entries)
        first = pool_ids.pool_of(token)
        if token and not first:
            raise limits.InvalidStartingToken(token)
        limit = min(max_entries or PAGE_MAX, PAGE_MAX)
        entries: list[Any] = []
        for pool_id in self._router.pools() if pools is None else pools:
            if pool_id < first:
                continue
            after = token if pool_id == first else ""
            while len(entries) <= limit:  # one more than fits tells that there is a next page
                found, after = await page(pool_id, min(limit + 1 - len(entries), _ASKED_MAX), after)
                entries.extend(found)
                if not after:
                    break
            if len(entries) > limit:
                return entries[:limit], id_of(entries[limit - 1])
        return entries, ""

    def _asking(self, left_s: float | None) -> Callable[[str, str, Any], Any]:
        """What asks the pools of one list, one after the other, within `left_s`. Raises `_Away`."""
        ends_s = None if left_s is None else time.monotonic() + left_s

        async def ask(pool_id: str, name: str, request: Any) -> Any:
            limit_s = NODE_S if ends_s is None else min(NODE_S, (ends_s - time.monotonic()) / 2)
            try:
                return await self._router.call(pool_id, name, request, left_s=limit_s)
            except (StoreUnavailable, LeadershipLost):
                raise
            except errors.PeerUnavailable as error:
                raise _Away(pool_id, self._node_of(pool_id), error) from error

        return ask

    def _records(self) -> _Records:
        return _Records(self._router.store, self._names)

    def _node_of(self, pool_id: str) -> str:
        """The node that had the pool last; empty if none is known."""
        return self._router.store.known_pools().get(pool_id, "")

    def _absent_entry(self, away: _Away) -> Callable[[str], csi_pb2.ListVolumesResponse.Entry]:
        def entry(volume_id: str) -> csi_pb2.ListVolumesResponse.Entry:
            pb = csi_pb2.ListVolumesResponse.Entry()
            pb.volume.volume_id = volume_id
            if away.node_id:
                pb.status.published_node_ids.append(away.node_id)
            if self._has_condition:
                pb.status.volume_condition.abnormal = True
                pb.status.volume_condition.message = limits.shortened(str(away.error))
            return pb

        return entry


def _absent(ids: Sequence[str], count: int, entry: Callable[[str], Any]) -> tuple[list[Any], str]:
    """Entries of a pool that is away, at most `count`."""
    shown = ids[:count]
    return [entry(each) for each in shown], shown[-1] if len(ids) > count else ""


def _inaccessible(away: _Away) -> Callable[[str], csi_pb2.VolumeHealth]:
    def entry(volume_id: str) -> csi_pb2.VolumeHealth:
        pb = csi_pb2.VolumeHealth(volume_id=volume_id)
        pb.health_statuses.add(
            status=csi_pb2.INACCESSIBLE,
            reason=away.error.error_name,
            message=limits.shortened(str(away.error)),
        )
        return pb

    return entry


def _capacity(available: int, maximum: int, minimum: int) -> csi_pb2.GetCapacityResponse:
    response = csi_pb2.GetCapacityResponse(available_capacity=available)
    response.maximum_volume_size.value = maximum
    response.minimum_volume_size.value = minimum
    return response
