"""Volumes that crashes and lost callers left half made or half removed: they are removed, and nobody else's are.

    record "deleting"                     the delete is finished at once: it was asked for
    record "creating", older than a day   deleted: CreateVolume never answered, and nobody asks for it any more
    image without a record                kept, and told as health: its owner lost a record, not the data
    record without an image               kept, and told as health

It runs as an operation of each volume, so it never meets a call for the same one. What cannot be removed now is tried
again an hour later.
"""

import asyncio
import logging

from crust import errors, operations, volumes
from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.records.volume_records import VolumeRecords

GRACE_S = 24 * 3600.0
"""Longer than any CO goes on retrying a CreateVolume that it wants."""

_log = logging.getLogger(__name__)


class VolumeGarbageCollector:
    """Finishes what was begun of volumes."""

    def __init__(
        self,
        driver: volumes.DriverName,
        known: VolumeRecords,
        provisioner: Provisioner,
        running: operations.KeyedOperations,
    ) -> None:
        self._driver = driver
        self._volume_records = known
        self._provisioner = provisioner
        self._running = running

    async def collect(self, *, grace_s: float = GRACE_S) -> tuple[volumes.VolumeId, ...]:
        """Remove what is unfinished; answers the volumes that are gone now."""
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
        if not await asyncio.to_thread(self._is_orphan, volume_id, grace_s):
            return False
        await self._provisioner.delete(volume_id)
        _log.info("removed an unfinished volume", extra={"volume_id": volume_id})
        return True

    def _is_orphan(self, volume_id: volumes.VolumeId, grace_s: float) -> bool:
        record = self._volume_records.find(volume_id)
        if record is None or record.phase == "ready":
            return False
        return record.phase == "deleting" or self._volume_records.age_s(volume_id) >= grace_s
