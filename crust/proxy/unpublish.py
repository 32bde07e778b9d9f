"""NodeUnpublishVolume of a deferred volume. The device is never detached while a guest uses it.

The proxy takes the claim lock first, so that no sandbox can claim the volume meanwhile; if a sandbox has it, the call
fails with the sandbox's name. Then it calls the driver. Then it renames the entry away, removes the guard mount and
the directory, and deletes the entry. If the proxy is killed before the rename, entry and guard are still there, and
the CO unpublishes again: it retries, and a restarted kubelet finds the volume by its mount point, the guard. After
the rename the driver has nothing any more, and the next start removes the rest without the CO: a kubelet that
restarts then may find no mount point, and would never ask again.
"""

import logging
from dataclasses import dataclass, replace

from crust.core import volumes
from crust.handoff import claims
from crust.handoff import store as stores
from crust.handoff.entry import UnknownHandoffFile
from crust.handoff.record import Record
from crust.host.process import workers
from crust.proxy.entries import Entries, Event, Events
from crust.proxy.target import Seen, Stack, Target, UnpublishPlan, begin_unpublish, other_volume
from crust.rpc.call import Metadata
from crust.rpc.csi_driver import CHANGE_TIMEOUT_S, CsiDriver
from crust.wire.csi.v1 import csi_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A removal with its locks: what was seen, and the entry, whose claim lock is held."""

    plan: UnpublishPlan
    seen: Seen
    entry: stores.Removal | None


class Unpublish:
    """Carries out deferred unpublishes, and the undo of deferred publishes."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._table = entries.table
        self._targets = entries.targets

    async def unpublish(
        self,
        backend: CsiDriver,
        key: volumes.VolumeKey,
        target: volumes.TargetPath,
        request: csi_pb2.NodeUnpublishVolumeRequest,
        metadata: Metadata,
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """Unpublish; raises `HeldBySandbox`, and `PeerStatus` with the driver's own status."""
        row = self._table.at(target.text)
        if row is None:
            return await self.remove(backend, key, target, request, metadata)
        self._table.put(replace(row, busy=True))
        try:
            response = await self.remove(backend, key, target, request, metadata)
        except BaseException:
            self._table.put(row)
            raise
        self._table.drop(row.name)
        record = row.record
        if record is not None:
            _report(self._entries.events, record)
        return response

    async def remove(
        self,
        backend: CsiDriver,
        key: volumes.VolumeKey,
        target: volumes.TargetPath,
        request: csi_pb2.NodeUnpublishVolumeRequest,
        metadata: Metadata,
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """Have the driver unpublish, and remove entry, guard and directory; the table stays as it is."""
        begun = await workers.run(self._begin, target, key)
        try:
            request.defer_fs_ops = await backend.defers()
            response = await backend.node.NodeUnpublishVolume(
                request, metadata=metadata, timeout=CHANGE_TIMEOUT_S
            )
            await workers.run(self._finish, target, begun)
        finally:
            if begun.entry is not None:
                begun.entry.close()
        return response

    def _begin(self, target: volumes.TargetPath, key: volumes.VolumeKey) -> _Begun:
        """Lock out sandboxes and check everything that could fail, before the driver is called. Blocks.

        There may be no entry: it was lost with /run, removed by an interrupted unpublish, or moved by a person. One
        without a record counts as absent (H-11), and is removed all the same.
        """
        try:
            entry = self._entries.store.begin_removal(target)
        except claims.NotPublished:
            entry = None
        try:
            self._entries.filesystems.locks.check_free(str(key))
            seen = self._targets.look(target)
            if entry is not None and (entry.entry.record or entry.entry.error):
                seen = replace(seen, entry=entry.entry)
            plan = begin_unpublish(seen, key)
            if plan is UnpublishPlan.REFUSE:
                self._refuse(seen, target, key)
        except BaseException:
            if entry is not None:
                entry.close()
            raise
        return _Begun(plan, seen, entry)

    def _refuse(self, seen: Seen, target: volumes.TargetPath, key: volumes.VolumeKey) -> None:
        if seen.entry is None:
            raise seen.problem or UnknownHandoffFile(target.text)
        raise other_volume(target.text, key, seen.entry.require().key)

    def _finish(self, target: volumes.TargetPath, begun: _Begun) -> None:
        if begun.plan is UnpublishPlan.DRIVER:
            return
        if begun.seen.is_covered:  # the driver's own mount too, perhaps: then it has removed it
            seen = self._targets.look(target)
            if seen.is_covered:
                raise seen.mounted(target)
        if begun.entry is None:
            self._targets.unmount_guard(target)
        else:
            begun.entry.complete(lambda: self._targets.unmount_guard(target))


def unfinished(row: Target, seen: Seen) -> Target | None:
    """The row after an operation that did not end in a deferred publish, from what was observed then; None: FREE."""
    if seen.stack is Stack.UNSEEN:
        return replace(row, stack=Stack.UNSEEN, busy=False)
    if seen.entry is None and seen.stack in (Stack.CLEAR, Stack.FOREIGN) and not row.raw:
        return None
    return replace(row, entry=seen.entry, stack=seen.stack, busy=False)


def _report(events: Events, record: Record) -> None:
    _log.info("unpublished", extra={"volume": str(record.key), "target": record.target.text})
    events.emit(Event("unpublished", record.target.text, record.handler))
