"""NodeUnpublishVolume of a deferred volume. The device is never detached while a guest uses it.

The proxy takes the claim lock first, so that no sandbox can claim the volume meanwhile; if a sandbox has it, the call
fails with the sandbox's name. Then it calls the driver. Then it renames the entry away, removes the guard mount and
the directory, and deletes the entry. If the proxy is killed before the rename, entry and guard are still there, and
the CO unpublishes again: it retries, and a restarted kubelet finds the volume by its mount point, the guard. After
the rename the driver has nothing any more, and the next start removes the rest without the CO: a kubelet that
restarts then may find no mount point, and would never ask again.
"""

import logging
from collections.abc import Callable

from crust import operations, volumes
from crust.handoff import claims
from crust.handoff import store as stores
from crust.handoff.record import Record
from crust.host.process import workers
from crust.proxy.csi.backend import Backend, Caller
from crust.proxy.deferrals.deferred import DeferredVolumes
from crust.proxy.deferrals.events import Event, Events
from crust.proxy.deferrals.targets import Targets
from crust.rpc.outcome import Residue
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
        if record is not None:
            self._deferred.check_key(record, key)
        flagged = csi_pb2.NodeUnpublishVolumeRequest()
        flagged.CopyFrom(request)
        flagged.defer_fs_ops = True
        response = await self._remove(
            backend, target, flagged, caller, lambda: self._begin(target, key)
        )
        self._deferred.forget(target)
        if record is not None:
            operations.after_answer(lambda: _report(self._events, record))
        return response

    async def undo(
        self,
        backend: Backend,
        key: volumes.VolumeKey,
        target: volumes.TargetPath,
        request: csi_pb2.NodeUnpublishVolumeRequest,
        caller: Caller,
    ) -> Residue:
        """Remove whatever a failed publish has made; an entry that cannot be read stays. Raises as `run` does."""
        there = await workers.run(self._deferred.store.read, target)
        is_ours = there is not None and there.record is not None
        await self._remove(
            backend, target, request, caller, lambda: self._begin(target, key) if is_ours else None
        )
        return Residue.NONE if there is None or is_ours else Residue.UNKNOWN

    async def _remove(
        self,
        backend: Backend,
        target: volumes.TargetPath,
        request: csi_pb2.NodeUnpublishVolumeRequest,
        caller: Caller,
        begin: Callable[[], stores.Unpublish | None],
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        entry = await workers.run(begin)
        try:
            response = await backend.unpublish(request, caller)
            await workers.run(self._finish, target, entry)
        finally:
            if entry is not None:
                entry.close()
        self._deferred.unfinished.discard(target.text)
        return response

    def _begin(self, target: volumes.TargetPath, key: volumes.VolumeKey) -> stores.Unpublish | None:
        """Lock out sandboxes and check everything that could fail, before the driver is called. Blocks.

        None if there is no entry: it was lost with /run, removed by an interrupted unpublish, or moved by a person.
        """
        try:
            entry = self._deferred.store.begin_unpublish(target)
        except claims.NotPublished:
            return None
        try:
            self._targets.check_free(target)
            if entry.entry.error is not None:
                raise entry.entry.error
            if entry.entry.record is not None:
                self._deferred.check_key(entry.entry.record, key)
        except BaseException:
            entry.close()
            raise
        return entry

    def _finish(self, target: volumes.TargetPath, entry: stores.Unpublish | None) -> None:
        if entry is None:
            self._targets.unmount_guard(target)
        else:
            entry.complete(lambda: self._targets.unmount_guard(target))


def _report(events: Events, record: Record) -> None:
    _log.info("unpublished", extra={"volume": str(record.key), "target": record.target.text})
    events.emit(Event("unpublished", record.target.text, record.handler))
