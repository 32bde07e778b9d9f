"""What crashes and lost callers leave behind, taken away without ever touching a volume that somebody was given.

    record "deleting"                     the delete is finished at once: it was asked for
    record "creating", older than a day   deleted: CreateVolume never answered, and nobody asks for it any more
    attached, and not staged              detached if nothing has it open: a stage that was never finished
    attached, and its image is gone       detached if nothing has it open; known by the tag that `attach` left on it
    attached by somebody else             left alone, whatever it is attached to
    image without a record                kept, and told as health: its owner lost a record, not the data
    record without an image               kept, and told as health

A sweep runs as an operation of each volume, so it never meets a call for the same one. What cannot be taken away
now is tried again by the next sweep.
"""

import asyncio
import logging

from crust import errors, operations, volumes
from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.engines.protocol import Attachment
from crust.blockdriver.node import io_limits
from crust.blockdriver.node.state import State
from crust.host.mounts import device_mounts, mountinfo

GRACE_S = 24 * 3600.0
"""Longer than any CO goes on retrying a CreateVolume that it wants."""
PERIOD_S = 3600.0

_log = logging.getLogger(__name__)


class GarbageCollector:
    """Sweeps at start and every hour."""

    def __init__(
        self,
        driver: volumes.DriverName,
        shared: State,
        provisioner: Provisioner,
        running: operations.KeyedOperations,
    ) -> None:
        self._driver = driver
        self._state = shared
        self._provisioner = provisioner
        self._running = running

    async def forever(self) -> None:
        """Sweep until cancelled; a sweep that fails is told, and does not end it."""
        while True:
            try:
                await self.sweep(grace_s=GRACE_S)
            except errors.CrustError as err:
                _log.warning("a sweep failed", extra={"error": str(err)})
            await asyncio.sleep(PERIOD_S)

    async def sweep(self, *, grace_s: float) -> tuple[volumes.VolumeId, ...]:
        """Take away what is left behind; answers the volumes that are gone now."""
        unfinished = self._state.volume_records.index.unfinished()
        gone = [each for each in unfinished if await self._remove(each, grace_s)]
        for volume_id in await asyncio.to_thread(self._unused):
            await self._detach(volume_id)
        await asyncio.to_thread(self._drop_strays)
        return tuple(gone)

    async def _remove(self, volume_id: volumes.VolumeId, grace_s: float) -> bool:
        key = volumes.VolumeKey(self._driver, volume_id)
        try:
            return await self._running.run(
                key, "removal of leftovers", None, lambda: self._finish(volume_id, grace_s)
            )
        except errors.CrustError as err:
            _log.warning("left behind", extra={"volume_id": volume_id, "error": str(err)})
            return False

    async def _finish(self, volume_id: volumes.VolumeId, grace_s: float) -> bool:
        if not await asyncio.to_thread(self._is_left_behind, volume_id, grace_s):
            return False
        await self._provisioner.delete(volume_id)
        _log.info("removed what was left behind", extra={"volume_id": volume_id})
        return True

    def _is_left_behind(self, volume_id: volumes.VolumeId, grace_s: float) -> bool:
        record = self._state.volume_records.find(volume_id)
        if record is None or record.phase == "ready":
            return False
        return record.phase == "deleting" or self._state.volume_records.age_s(volume_id) >= grace_s

    def _unused(self) -> tuple[volumes.VolumeId, ...]:
        attached = self._state.backend.attached_here()
        return tuple(each for each in attached if self._state.node_state.staged(each) is None)

    async def _detach(self, volume_id: volumes.VolumeId) -> None:
        key = volumes.VolumeKey(self._driver, volume_id)
        try:
            await self._running.run(
                key,
                "detaching of leftovers",
                None,
                lambda: asyncio.to_thread(self._detach_unused, volume_id),
            )
        except errors.CrustError as err:
            _log.info("stays attached", extra={"volume_id": volume_id, "error": str(err)})

    def _detach_unused(self, volume_id: volumes.VolumeId) -> None:
        attachment = self._state.backend.attached(volume_id)
        if attachment is None or self._state.node_state.staged(volume_id) is not None:
            return
        if not _is_shown(attachment):
            self._release(attachment)
            self._state.backend.detach(volume_id)
            _log.info("detached what was left behind", extra={"volume_id": volume_id})

    def _drop_strays(self) -> None:
        """No volume's operation: the device is not the one that an operation of the volume would find."""
        for stray in self._state.backend.strays():
            told = {"device": stray.shown}
            if _is_shown(stray):
                _log.info("stays attached, and its image is gone", extra=told)
                continue
            try:
                self._release(stray)
                self._state.backend.drop(stray)
            except errors.CrustError as err:
                _log.info("stays attached", extra={**told, "error": str(err)})
            else:
                _log.warning("detached a device whose image is gone", extra=told)

    def _release(self, attachment: Attachment) -> None:
        if attachment.device is not None:
            io_limits.release(self._state, attachment)


def _is_shown(attachment: Attachment) -> bool:
    """Asked of the kernel, because a ledger can be lost: a raw device's node is bound and not open."""
    device = attachment.device
    return device is not None and any(
        device_mounts.shows(each, device) for each in mountinfo.below("/")
    )
