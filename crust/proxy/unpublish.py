"""NodeUnpublishVolume of a deferred volume. The device is never detached while a guest uses it.

The proxy takes the claim lock first, so that no sandbox can claim the volume meanwhile; if a sandbox has it, the call
fails with the sandbox's name. A free lock does not say that nobody writes: its keepers may have been killed. So the
process of a dead claim must be seen to have ended, or no process must have the device open for writing. A record that
cannot be read must say whose it is and which device, and no more. Then the proxy calls the driver. Then it renames
the entry away, removes the guard mount and the directory, and deletes the entry. If the proxy is killed before the
rename, entry and guard are still there, and the CO unpublishes again: it retries, and a restarted kubelet finds the
volume by its mount point, the guard. After the rename the driver has nothing any more, and the next start removes the
rest without the CO: a kubelet that restarts then may find no mount point, and would not unpublish again.
"""

import logging
import os
from dataclasses import dataclass, replace
from typing import Protocol

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.store import Removal
from crust.host.process import workers
from crust.proxy.table import Entries, Event
from crust.proxy.target import MountStack, TargetState, UnpublishPlan, other_volume, unpublish_plan
from crust.rpc.call import Metadata
from crust.rpc.csi_driver import CHANGE_TIMEOUT_S, CsiDriver
from crust.wire.csi.v1 import csi_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unpublish:
    """Carries out deferred unpublishes, and the undo of deferred publishes."""

    entries: Entries

    async def unpublish(
        self,
        backend: CsiDriver,
        key: volumes.VolumeKey,
        target: volumes.TargetPath,
        request: csi_pb2.NodeUnpublishVolumeRequest,
        metadata: Metadata,
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """Unpublish; raises `HeldBySandbox`, and `PeerStatus` with the driver's own status."""
        row = self.entries.table.at(target.text)
        if row is None:
            return await self.remove(backend, key, target, request, metadata)
        self.entries.table.put(replace(row, busy=True))
        try:
            response = await self.remove(backend, key, target, request, metadata)
        except BaseException as error:
            is_refused = isinstance(error, errors.CrustError)
            self.entries.table.put(replace(row, unpublish_refused=is_refused))
            if isinstance(error, errors.CrustError) and row.unpublish_refused:
                # Kubernetes shows the refusal of an unpublish to no user
                refused_again = errors.NotReady.named(
                    "UnpublishRefused",
                    f"the volume at {target} cannot be unpublished, so its pod does not end",
                    why=error.shown(),
                    hint=error.hint,
                )
                self.entries.report_problem(row.name, "unpublish", refused_again)
            raise
        self.entries.report_problem(row.name, "unpublish", None)
        self.entries.table.drop(row.name)
        if row.record is not None:
            _log.info("unpublished", extra={"volume": str(row.key), "target": row.path})
            self.entries.events.emit(Event("unpublished", row.path, row.record.handler))
        return response

    async def remove(
        self,
        backend: CsiDriver,
        key: volumes.VolumeKey,
        target: volumes.TargetPath,
        request: csi_pb2.NodeUnpublishVolumeRequest,
        metadata: Metadata,
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """Call the driver's unpublish, then remove entry, guard and directory; the table does not change."""
        seen, removal = await workers.run(self._begin, target, key)
        try:
            request.defer_fs_ops = await backend.defers()
            response = await backend.node.NodeUnpublishVolume(
                request, metadata=metadata, timeout=CHANGE_TIMEOUT_S
            )
            if unpublish_plan(seen, key) is not UnpublishPlan.DRIVER:
                await workers.run(self._finish, target, seen, removal)
        except Exception:
            try:  # the guard stays on a target whose unpublish was refused
                await workers.run(self._seal_guarded, target)
            except errors.CrustError as error:
                extra = {"target": target.text, "error": error}
                _log.warning("not immutable any more", extra=extra)
            raise
        finally:
            if removal is not None:
                removal.close()
        return response

    def _seal_guarded(self, target: volumes.TargetPath) -> None:
        targets = self.entries.targets
        if targets.look(target).stack in (MountStack.GUARD, MountStack.BURIED):
            targets.seal(target)

    def _begin(
        self, target: volumes.TargetPath, key: volumes.VolumeKey
    ) -> tuple[TargetState, Removal | None]:
        """Lock out sandboxes and check everything that could fail, before the driver is called. Blocks.

        There may be no entry: it was lost with /run, removed by an interrupted unpublish, or moved by a person. An
        entry without a record counts as absent (H-11), and is removed too.
        """
        try:
            removal = self.entries.store.begin_removal(target)
        except claims.NotPublished:
            removal = None
        try:
            self.entries.filesystems.locks.check_free(str(key))
            seen = self.entries.targets.look(target)
            if removal is not None and (removal.entry.record or removal.entry.error):
                seen = replace(seen, entry=removal.entry)
            if unpublish_plan(seen, key) is UnpublishPlan.REFUSE and seen.entry is not None:
                reserved = seen.entry.reservation or seen.entry.require().reserved
                if reserved.device is None:
                    seen.entry.require()
                raise other_volume(target.text, key, reserved.key)
            self._check_given_back(removal)
            if seen.stack is not MountStack.FOREIGN:
                # a driver may unmount what is there, and remove it
                self.entries.targets.unseal(target)
        except BaseException:
            if removal is not None:
                removal.close()
            raise
        return seen, removal

    def _check_given_back(self, removal: Removal | None) -> None:
        """Raise while something writes to the device of the entry, if it is on this host and has not gone."""
        reserved = removal.entry.reservation if removal is not None else None
        if removal is None or reserved is None or reserved.readonly:
            return
        record = removal.entry.record
        device = None
        if record is not None:
            device = record.block if record.image is None else None
        elif isinstance(reserved.device, volumes.DeviceIdentity):
            number = os.makedev(reserved.device.major, reserved.device.minor)
            device = self.entries.devices.of_number(number)
            if device is not None and device.identity != reserved.device:
                return  # another device has its number
        if device is not None:
            check_given_back(self.entries.targets, device, has_ended=removal.has_ended)

    def _finish(
        self, target: volumes.TargetPath, began: TargetState, removal: Removal | None
    ) -> None:
        if began.is_covered:  # the mount may have been the driver's own, which has removed it now
            seen = self.entries.targets.look(target)
            if seen.is_covered:
                raise seen.mounted(target)
        if removal is None:
            self.entries.targets.unmount_guard(target)
        else:
            removal.complete(lambda: self.entries.targets.unmount_guard(target))


class GivenBack(Protocol):
    """The questions about a device before its driver may have it back; `guard.Targets` asks the host."""

    def check_given_back(self, source: volumes.BlockSource) -> None:
        """Raise while a process writes to the device, or that is not seen."""

    def check_writes_ended(self, source: volumes.BlockSource) -> None:
        """Raise while writes to the device are in flight, or that is not seen."""


def check_given_back(host: GivenBack, source: volumes.BlockSource, *, has_ended: bool) -> None:
    """Raise while something writes to the device, as a virtual machine does whose claim has ended. Blocks.

    `has_ended`: the process of the claim was seen to have ended, and only its writes may be left. Without one
    (claim.json is lost, or the runtime names no process) the open files of all processes are looked at.
    """
    check = host.check_writes_ended if has_ended else host.check_given_back
    check(source)
