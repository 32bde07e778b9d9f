"""Devices that crashes left attached on this node: they are detached, unless somebody may be using them.

    attached, and not staged              detached if nothing has it open: a stage that was never finished
    attached, and its image is gone       detached if nothing has it open; known by the tag that `attach` left on it
    attached by somebody else             left alone, whatever it is attached to

It runs as an operation of each volume, so it never meets a call for the same one. What cannot be detached now is
tried again an hour later.
"""

import asyncio
import logging

from crust import errors, operations, volumes
from crust.blockdriver.engines.protocol import Attachment, Backend
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.node_state import NodeState
from crust.host.mounts import device_mounts, mountinfo

_log = logging.getLogger(__name__)


class AttachmentGarbageCollector:
    """Detaches what nobody uses."""

    def __init__(
        self,
        driver: volumes.DriverName,
        node_state: NodeState,
        backend: Backend,
        io_limits: IoLimits,
        running: operations.KeyedOperations,
    ) -> None:
        self._driver = driver
        self._node_state = node_state
        self._backend = backend
        self._io_limits = io_limits
        self._running = running

    async def collect(self) -> None:
        """Detach what is attached and not staged, and what has no image any more."""
        for volume_id in await asyncio.to_thread(self._unused):
            await self._detach(volume_id)
        await asyncio.to_thread(self._drop_strays)

    def _unused(self) -> tuple[volumes.VolumeId, ...]:
        attached = self._backend.attached_here()
        return tuple(each for each in attached if self._node_state.staged(each) is None)

    async def _detach(self, volume_id: volumes.VolumeId) -> None:
        key = volumes.VolumeKey(self._driver, volume_id)
        try:
            await self._running.run(
                key,
                "detaching of an orphan",
                None,
                lambda: asyncio.to_thread(self._detach_unused, volume_id),
            )
        except errors.CrustError as err:
            _log.info("stays attached", extra={"volume_id": volume_id, "error": err})

    def _detach_unused(self, volume_id: volumes.VolumeId) -> None:
        attachment = self._backend.attached(volume_id)
        if attachment is None or self._node_state.staged(volume_id) is not None:
            return
        if not _is_shown(attachment):
            self._release(attachment)
            self._backend.detach(volume_id)
            _log.info("detached a device that nobody staged", extra={"volume_id": volume_id})

    def _drop_strays(self) -> None:
        """No volume's operation: the device is not the one that an operation of the volume would find."""
        for stray in self._backend.strays():
            told = {"device": stray.shown}
            if _is_shown(stray):
                _log.info("stays attached, and its image is gone", extra=told)
                continue
            try:
                self._release(stray)
                self._backend.drop(stray)
            except errors.CrustError as err:
                _log.info("stays attached", extra={**told, "error": err})
            else:
                _log.warning("detached a device whose image is gone", extra=told)

    def _release(self, attachment: Attachment) -> None:
        if attachment.device is not None:
            self._io_limits.release(attachment)


def _is_shown(attachment: Attachment) -> bool:
    """Asked of the kernel, because a ledger can be lost: a raw device's node is bound and not open."""
    device = attachment.device
    return device is not None and any(
        device_mounts.shows(each, device) for each in mountinfo.below("/")
    )
