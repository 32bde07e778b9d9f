"""Garbage collection of incomplete volumes, which crashes and lost callers leave.

    record "deleting"                     the delete is finished at once: it was requested
    record "creating", older than a day   deleted: CreateVolume never answered, and no CO still retries it
        and its content was used          kept, and logged: the record is an old one, of a backup
    image without a record                kept, and reported as health: the record was lost, not the data
    record without an image               kept, and reported as health

Each removal is an operation of its volume, so it never runs beside another call for it. What cannot be removed is
tried again an hour later.
"""

import logging

from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.records.models import VolumeRecord
from crust.blockdriver.records.records import Records
from crust.core import errors, operations, volumes
from crust.host.process import workers

GRACE_S = 24 * 3600.0
"""Longer than any CO keeps retrying a CreateVolume."""

_log = logging.getLogger(__name__)


class VolumeGarbageCollector:
    """Deletes incomplete volumes."""

    def __init__(
        self,
        driver: volumes.DriverName,
        known: Records[VolumeRecord],
        provisioner: Provisioner,
        running: operations.KeyedOperations,
    ) -> None:
        self._driver = driver
        self._volume_records = known
        self._provisioner = provisioner
        self._running = running

    async def collect(self, *, grace_s: float = GRACE_S) -> tuple[volumes.VolumeId, ...]:
        """Delete incomplete volumes; returns those that were deleted."""
        unfinished = self._volume_records.index.unfinished()
        return tuple([each for each in unfinished if await self._remove(each, grace_s)])

    async def _remove(self, volume_id: volumes.VolumeId, grace_s: float) -> bool:
        key = volumes.VolumeKey(self._driver, volume_id)
        try:
            return await self._running.run(
                key,
                "removal of an unfinished volume",
                None,
                lambda: self._finish(volume_id, grace_s),
            )
        except errors.CrustError as err:
            _log.warning("an unfinished volume stays", extra={"volume_id": volume_id, "error": err})
            return False

    async def _finish(self, volume_id: volumes.VolumeId, grace_s: float) -> bool:
        record = await workers.run(self._orphan, volume_id, grace_s)
        if record is None:
            return False
        # what was judged, and no other: another controller may have made the volume again meanwhile
        await workers.run(self._provisioner.remove, record)
        _log.info("removed an unfinished volume", extra={"volume_id": volume_id})
        return True

    def _orphan(self, volume_id: volumes.VolumeId, grace_s: float) -> VolumeRecord | None:
        record = self._volume_records.find(volume_id)
        if record is None or record.phase == "ready":
            return None
        if record.phase == "deleting":
            return record
        if self._volume_records.age_s(volume_id) < grace_s:
            return None
        self._check_unused(record)
        return record

    def _check_unused(self, record: VolumeRecord) -> None:
        """A create writes the content once, as the last but one step; everything after that a node has written."""
        content = self._provisioner.content_records.find(volumes.VolumeId(record.volume_id))
        if content is None:
            return
        is_copy = record.content_source is not None
        if content.revision > 1 or (not is_copy and (content.state != "new" or content.in_guest)):
            raise errors.Corrupt.named(
                "CreatingVolumeUsed",
                f"the volume {record.volume_id} is not deleted",
                why=(
                    f'its record says "creating", and its content is {content.state!r}: the '
                    "volume was in use after that record was written, which is of a backup"
                ),
                hint=(
                    "restore a newer volume record, or stop the driver and set its field phase "
                    'to "ready"'
                ),
            )
