"""Garbage collection of snapshots and groups that a crash or a full disk left incomplete.

None of them was ever answered, and a retry of the same name would discard it as well. Each is discarded as an
operation of its own id, so never beside the call that takes it. A group is discarded with its members.
What cannot be discarded is tried again an hour later.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from crust.blockdriver.records.models import GroupRecord, SnapshotRecord
from crust.blockdriver.records.records import Records
from crust.blockdriver.snapshots.group_snapshot import GroupSnapshots
from crust.blockdriver.snapshots.take_snapshot import VolumeSnapshots
from crust.core import errors, operations, volumes
from crust.host.process import workers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotGarbageCollector:
    """Discards incomplete snapshots and groups."""

    driver: volumes.DriverName
    snapshot_records: Records[SnapshotRecord]
    groups: Records[GroupRecord]
    volume_snapshots: VolumeSnapshots
    group_snapshots: GroupSnapshots
    running: operations.KeyedOperations

    async def collect(self) -> None:
        """Discard all that are not ready, and that no call works on."""
        for group in self.groups.unfinished():
            await self._discard(group.id, self.group_snapshots.discard_unfinished)
        for record in self.snapshot_records.unfinished():
            if not self.groups.index.has(record.group_id):
                await self._discard(record.id, self.volume_snapshots.discard_unfinished)

    async def _discard(self, record_id: str, discard: Callable[[str], None]) -> None:
        key = volumes.VolumeKey(self.driver, volumes.VolumeId(record_id))
        try:
            await self.running.run(
                key,
                "removal of an incomplete snapshot",
                None,
                lambda: workers.run(discard, record_id),
            )
        except errors.CrustError as err:
            extra = {"snapshot_id": record_id, "error": err}
            _log.info("an incomplete snapshot stays", extra=extra)
