"""NodeUnpublishVolume of a deferred volume. The device is never detached while a guest uses it.

The proxy takes the claim lock first, so that no sandbox can claim the volume meanwhile; if a sandbox has it, the call
fails with the sandbox's name. Then it calls the driver, then removes the guard mount and the directory, and the entry
last: if the proxy is killed at any point before, the entry is still there and the CO's retry unpublishes it.
"""

import asyncio
import logging

from crust import volumes
from crust.handoff import store as stores
from crust.handoff.record import Record
from crust.proxy.backend import Backend, Caller
from crust.proxy.deferred import DeferredVolumes
from crust.proxy.events import Event, Events
from crust.proxy.targets import Targets
from crust.wire.csi.v1 import csi_pb2

_log = logging.getLogger(__name__)


class DeferredUnpublish:
    """Carries out deferred unpublishes."""

    def __init__(self, deferred: DeferredVolumes, events: Events, targets: Targets) -> None:
        self._deferred = deferred
        self._events = events
        self._targets = targets

    async def run(
        self,
        backend: Backend,
        key: volumes.VolumeKey,
        target: volumes.TargetPath,
        request: csi_pb2.NodeUnpublishVolumeRequest,
        caller: Caller,
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """Unpublish; raises `HeldBySandbox`, and `grpc.aio.AioRpcError` with the driver's own status."""
        record = self._deferred.find(target.text)
        flagged = csi_pb2.NodeUnpublishVolumeRequest()
        flagged.CopyFrom(request)
        flagged.defer_fs_ops = True
        if record is None:  # the entry was lost with /run, or removed by an interrupted unpublish
            response = await backend.unpublish(flagged, caller)
            await asyncio.to_thread(self._targets.unmount_guard, target)
            return response
        self._deferred.check_key(record, key)
        entry = await asyncio.to_thread(self._begin, target)
        try:
            response = await backend.unpublish(flagged, caller)
            await asyncio.to_thread(self._finish, target, entry)
        finally:
            entry.close()
        self._forget(record)
        return response

    def _begin(self, target: volumes.TargetPath) -> stores.Unpublish:
        """Lock out sandboxes and check everything that could fail, before the driver is called. Blocks."""
        self._targets.check_free(target)
        return self._deferred.store.begin_unpublish(target)

    def _finish(self, target: volumes.TargetPath, entry: stores.Unpublish) -> None:
        self._targets.unmount_guard(target)
        entry.complete()

    def _forget(self, record: Record) -> None:
        self._deferred.forget(record.target.text)
        _log.info("unpublished", extra={"volume": str(record.key), "target": record.target.text})
        self._events.emit(Event("unpublished", record.target.text, record.handler))
