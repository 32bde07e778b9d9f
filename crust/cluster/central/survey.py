"""What each pool has, recorded once; and records of what no pool has, removed.

A survey asks the node first for the names that it is creating, and then for what stands: a volume that is not there
yet is in the first answer, or in the second. A creation that begins later is recorded before it is sent. So once the
pool is marked as surveyed, no name of it is without a record, whatever was under way when the records were lost.

The members of a group snapshot have names that no snapshot can have, and go with their group: the group is recorded,
and they are not. Earlier versions recorded them. Such records, and those that a controller left that died between a
removal and the record's, are looked for: what a pool does not list is asked for by name, in the order of all changes
of that name, before its record goes. Records of volumes are not looked for: the next creation of the name would begin
elsewhere, beside what a creation that was never repeated has left.

But a pool that lacks what is recorded there may be an older copy of its disk, and what is created in its place,
perhaps elsewhere, is a second volume of the name once the newer copy is back. So a survey also reports such records.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from google.protobuf import empty_pb2

from crust import errors, metrics, operations, pool_ids
from crust.cluster.central.names import Names
from crust.cluster.central.routing import Router
from crust.cluster.methods import NAMES_UNDER_WAY
from crust.wire.csi.v1 import csi_pb2

PAGE = 500
AT_ONCE = 32
POOLS_AT_ONCE = 16
SURVEY_EVERY_S = 1.0
COLLECT_EVERY_S = 3600.0
COMPARE_S = 10.0
"""How long a term waits for its nodes before it creates a new name."""
_RECORDS = 1000
_COLLECTED = ("group-", "snapshot-")
"""The kinds of records that are looked for."""
_REPORTED = 10
"""How many of the volumes that a pool lacks are asked for and named."""

_log = logging.getLogger(__name__)


class Survey:
    """Keeps the records of one term complete, and free of what does not stand."""

    def __init__(self, router: Router, names: Names, running: operations.KeyedOperations) -> None:
        self._router = router
        self._names = names
        self._running = running
        self._places = asyncio.Semaphore(POOLS_AT_ONCE)
        self._collect_at_s: dict[str, float] = {}
        self._found: dict[str, set[str]] = {}
        """By pool that was surveyed since what pools lack was looked for: what it has."""

    async def keep(self) -> None:
        """Survey pools when they are connected, and collect, until cancelled."""
        try:
            await self._compare()
        finally:
            self._names.are_compared()
        while True:
            await self._tried(self._names.look(), "whether the store is new is not known")
            if self._router.connected():
                await self._names.settle()
            async with asyncio.TaskGroup() as surveys:
                for pool_id in self._served():
                    surveys.create_task(self._surveyed(pool_id))
            await self._tried(self._look_for_lacking(), "what pools lack cannot be looked for")
            await self._tried(self._collect(), "old records cannot be looked for")
            await asyncio.sleep(SURVEY_EVERY_S)

    async def forget_if_gone(self, pool_id: str, key: str) -> None:
        """Remove the record of a name if nothing of that name stands. Raises what the node answers, as `Names`."""

        async def work() -> None:
            if await self._router.store.placement(key) != pool_id:
                return
            if not await self._names.stands(pool_id, key):
                await self._names.forget(key, pool_id)

        # one operation per name: a creation records the name before it is sent, and that record must stay
        await self._running.run(key, "collection", b"", work)

    async def _surveyed(self, pool_id: str) -> None:
        async with self._places:  # a node that hangs must not delay the others' surveys
            await self._tried(self._survey(pool_id), "a pool cannot be surveyed")

    async def _compare(self) -> None:
        """Ask the nodes that are connected, before a survey that is recorded is believed.

        What a node announces is of now once it has answered: it announces what it has found before it answers.
        """
        with contextlib.suppress(
            TimeoutError
        ):  # one that hangs, or is in a backup, must not keep the others
            async with asyncio.timeout(COMPARE_S), asyncio.TaskGroup() as comparisons:
                for pool_id in self._served():
                    comparisons.create_task(self._compared(pool_id))

    async def _compared(self, pool_id: str) -> None:
        async with self._places:
            await self._tried(self._under_way(pool_id), "a node does not answer")
            found = self._names.compare(pool_id, self._names.node_process(pool_id))
            await self._tried(found, "a survey cannot be compared")

    def _served(self) -> list[str]:
        return [each.pool_id for each in self._router.connected() if each.is_ready]

    async def _tried(self, work: Any, what: str) -> None:
        try:
            await work
        except errors.PeerUnavailable as error:
            _log.info(f"{what} yet", extra={"error": error})
        except errors.CrustError as error:
            _log.warning(what, extra={"error": error})

    async def _survey(self, pool_id: str) -> None:
        if await self._names.compare(pool_id, self._names.node_process(pool_id)):
            return
        found = [await self._under_way(pool_id)]
        node_process = self._names.node_process(pool_id)
        if not node_process or await self._names.compare(pool_id, node_process):
            return
        found += [
            [key async for key in each]
            for each in (self._volumes(pool_id), self._snapshots(pool_id))
        ]
        for keys in found:
            await self._record(pool_id, keys)
        await self._names.mark_surveyed(pool_id, node_process)
        self._found[pool_id] = {key for keys in found for key in keys}
        _log.info("pool surveyed", extra={"pool_id": pool_id, "names": sum(map(len, found))})

    async def _under_way(self, pool_id: str) -> list[str]:
        try:
            got = await self._router.call(pool_id, NAMES_UNDER_WAY.name, empty_pb2.Empty())
        except errors.Unsupported:  # a node of an earlier version
            return []
        return [str(each) for each in got]

    async def _volumes(self, pool_id: str) -> AsyncIterator[str]:
        token = ""
        while True:
            asked = csi_pb2.ListVolumesRequest(max_entries=PAGE, starting_token=token)
            page = await self._router.call(pool_id, "ListVolumes", asked)
            for each in page.entries:
                yield pool_ids.key_of(each.volume.volume_id)
            token = page.next_token
            if not token:
                return

    async def _snapshots(self, pool_id: str) -> AsyncIterator[str]:
        """The snapshots, and in place of each member its group."""
        token = ""
        while True:
            asked = csi_pb2.ListSnapshotsRequest(max_entries=PAGE, starting_token=token)
            page = await self._router.call(pool_id, "ListSnapshots", asked)
            for each in page.entries:
                pb = each.snapshot
                yield pool_ids.key_of(pb.group_snapshot_id or pb.snapshot_id)
            token = page.next_token
            if not token:
                return

    async def _record(self, pool_id: str, keys: Iterable[str]) -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(key: str) -> None:
            async with places:
                recorded = await self._router.store.placement(key)
                if recorded != pool_id:
                    recorded = await self._corrected(pool_id, key)
            if recorded != pool_id:
                extra = {"name_key": key, "pool_id": pool_id, "other_pool": recorded}
                metrics.survey_findings.labels(metrics.TWICE).inc()
                _log.error("one name is in two pools; delete one of the two by hand", extra=extra)

        await asyncio.gather(*(one(each) for each in dict.fromkeys(keys) if each))

    async def _corrected(self, pool_id: str, key: str) -> str:
        """Record the pool of a name that it has, in place of one that has it no more since a backup was made.

        Raises what the node of that one answers, or why it does not: then the pool stays unsurveyed.
        """

        async def work() -> str:
            recorded = await self._names.record(key, pool_id)
            if recorded == pool_id:
                return recorded
            is_retired = recorded in self._router.store.retired_pools()
            if not is_retired and await self._names.stands(recorded, key):
                return recorded
            await self._names.forget(key, recorded)
            return await self._names.record(key, pool_id)

        return await self._running.run(key, "survey", b"", work)

    async def _look_for_lacking(self) -> None:
        """Report volumes that are recorded in a pool that was just surveyed, and are not there."""
        if not self._found:
            return
        lacking: dict[str, list[str]] = {}
        for key, pool_id in await self._records(("volume-",)):
            if key not in self._found.get(pool_id, {key}):
                lacking.setdefault(pool_id, []).append(key)
        for pool_id, keys in lacking.items():
            await self._tried(self._report_lacking(pool_id, keys), "what a pool lacks is not known")
        self._found.clear()

    async def _report_lacking(self, pool_id: str, keys: list[str]) -> None:
        named = [key for key in keys[:_REPORTED] if await self._is_lacking(pool_id, key)]
        if not named:
            return
        metrics.survey_findings.labels(metrics.LACKING).inc(len(keys))
        _log.warning(
            "a pool lacks volumes that are recorded there: its disk, or the store, is an older copy, or creations"
            " never ended; if there is a newer copy of the disk, put it back before they are created again",
            extra={"pool_id": pool_id, "volumes": len(keys), "name_keys": ", ".join(named)},
        )

    async def _is_lacking(self, pool_id: str, key: str) -> bool:
        """Whether the volume is still recorded there and does not stand, in the order of all changes of its name."""

        async def work() -> bool:
            recorded = await self._router.store.placement(key)
            return recorded == pool_id and not await self._names.stands(pool_id, key)

        try:
            return await self._running.run(key, "survey", b"", work)
        except errors.OperationPending:  # it is being made, or removed
            return False

    async def _collect(self) -> None:
        now = time.monotonic()
        due = [each for each in self._served() if now >= self._collect_at_s.get(each, 0)]
        if not due:
            return
        records = await self._records(_COLLECTED)
        for pool_id in due:
            recorded = [key for key, pool in records if pool == pool_id]
            await self._tried(self._collect_in(pool_id, recorded), "old records are kept")

    async def _collect_in(self, pool_id: str, recorded: list[str]) -> None:
        listed = {key async for key in self._snapshots(pool_id)} if recorded else set()
        for key in recorded:
            if key not in listed:
                with contextlib.suppress(errors.OperationPending):  # it is being made, or removed
                    await self.forget_if_gone(pool_id, key)
        self._collect_at_s[pool_id] = time.monotonic() + COLLECT_EVERY_S

    async def _records(self, kinds: Iterable[str]) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for kind in kinds:
            after = kind
            while True:
                rows = await self._router.store.placements(after, _RECORDS)
                own = [row for row in rows if row[0].startswith(kind)]
                found += own
                if len(own) < _RECORDS:
                    break
                after = own[-1][0]
        return found
