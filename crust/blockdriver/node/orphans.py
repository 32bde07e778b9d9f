"""Garbage collection of devices that crashes left attached on this node, unless they may be in use.

    attached, not staged                  detached if it is not open: its stage was never completed
    attached, image removed               detached if it is not open; recognised by the tag of `attach`
    attached by another program           left alone, whatever its file

Each detach is an operation of its volume, so it never runs beside another call for it. What cannot be detached is
tried again an hour later.
"""

import logging

from crust.blockdriver.engines.node_access import Attachment, NodeAccess
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.node_state import NodeState
from crust.core import errors, operations, volumes
from crust.host.mounts import device_mounts, mountinfo
from crust.host.process import workers

_log = logging.getLogger(__name__)


class AttachmentGarbageCollector:
    """Detaches unused devices."""

    def __init__(
        self,
        driver: volumes.DriverName,
        node_state: NodeState,
        access: NodeAccess,
        io_limits: IoLimits,
        running: operations.KeyedOperations,
    ) -> None:
        self._driver = driver
        self._node_state = node_state
        self._access = access
        self._io_limits = io_limits
        self._running = running

    async def collect(self) -> None:
        """Detach devices of volumes that are not staged, or have no image any more."""
        for volume_id in await workers.run(self._unused):
            await self._detach(volume_id)
        await workers.run(self._drop_orphans)

    def _unused(self) -> tuple[volumes.VolumeId, ...]:
        attached = self._access.attached_here()
        return tuple(each for each in attached if not self._is_staged(each))

    def _is_staged(self, volume_id: volumes.VolumeId) -> bool:
        """Whether there is an entry, readable or not."""
        unreadable = self._node_state.unreadable(volume_id)
        return bool(unreadable) or self._node_state.staged(volume_id) is not None

    async def _detach(self, volume_id: volumes.VolumeId) -> None:
        key = volumes.VolumeKey(self._driver, volume_id)
        try:
            await self._running.run(
                key,
                "detaching of an orphan",
                None,
                lambda: workers.run(self._detach_unused, volume_id),
            )
        except errors.CrustError as err:
            _log.info(
                "an orphaned device stays attached", extra={"volume_id": volume_id, "error": err}
            )

    def _detach_unused(self, volume_id: volumes.VolumeId) -> None:
        attachment = self._access.attached(volume_id)
        if attachment is None or self._is_staged(volume_id):
            return
        if not _is_shown(attachment):
            with self._io_limits.released(attachment):
                self._access.detach(volume_id)
            _log.info("detached a device that is not staged", extra={"volume_id": volume_id})

    def _drop_orphans(self) -> None:
        """Not an operation of the volume, which would not find this device."""
        for orphan in self._access.orphans():
            extra = {"device": orphan.shown}
            if _is_shown(orphan):
                _log.info("an orphaned device whose image was removed stays attached", extra=extra)
                continue
            try:
                with self._io_limits.released(orphan):
                    self._access.drop(orphan)
            except errors.CrustError as err:
                _log.info("an orphaned device stays attached", extra={**extra, "error": err})
            else:
                _log.warning("detached a device whose image was removed", extra=extra)


def _is_shown(attachment: Attachment) -> bool:
    """Whether the node is bound anywhere, by mountinfo: a bound node is not open, and node state can be lost."""
    device = attachment.device
    return device is not None and any(
        device_mounts.shows(each, device) for each in mountinfo.below("/")
    )
