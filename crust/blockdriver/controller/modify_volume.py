"""ControllerExpandVolume and ControllerModifyVolume: one change of a volume at a time, ordered by its key.

At an expansion the image grows first, then the record, then the device.

Limits are enforced on this host if the volume is published here, in its guest if it is deferred. A change of them is
atomic. All checks come before the first write. The record then holds the new limits and, until they are enforced
everywhere, the previous ones: a refusal restores the previous limits, also after a crash, when the caller's retry
continues. While a guest is unreachable its state is unknown: the intent stays, the answer is UNAVAILABLE, and a retry
finishes the change.

If the storage enforces I/O limits itself, the driver calls neither this host nor a guest.
"""

import asyncio
import logging
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol

from crust.blockdriver.controller import class_parameters
from crust.blockdriver.engines.protocol import SetLimits
from crust.blockdriver.records import capability_check, capacity
from crust.blockdriver.records.models import Limits, VolumeRecord
from crust.blockdriver.records.records import UNREADABLE
from crust.blockdriver.records.stores import Stores
from crust.core import deferral_keys, errors, volumes
from crust.host.process import workers

_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""The pauses between a starting driver's tries to reach guests. Each try locks the volume."""

_AGAIN = (errors.PeerUnavailable, errors.OperationPending)
"""Not final: a guest is unreachable, or another operation has the volume."""

_log = logging.getLogger(__name__)


class LimitEnforcement(Protocol):
    """Enforces the I/O limits of a volume: this node does (`IoLimits`), or the storage."""

    def check_limits(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """Raise the reason if `limits` cannot be enforced, as far as it is known before the change."""

    def set_on_host(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """Enforce `limits` on this host's mounts of the volume, if it has any."""

    async def set_in_guests(
        self, volume_id: volumes.VolumeId, limits: volumes.IoLimits, before: volumes.IoLimits
    ) -> None:
        """Enforce `limits` in every guest that has the volume.

        Raises `PeerUnavailable` when the outcome in a guest is unknown. After any other error the guests that had
        changed have `before` again.
        """


@dataclass(frozen=True, slots=True)
class VolumeModifier:
    """Changes volumes. The caller makes one call per volume at a time."""

    stores: Stores
    enforcement: LimitEnforcement

    async def modify(self, volume_id: volumes.VolumeId, changes: class_parameters.Changes) -> None:
        """Change limits. Raises `models.VolumeNotFound`, `ImageMissing`, and the errors of `LimitEnforcement`: then
        the limits are as before, unless the outcome in a guest is unknown (`PeerUnavailable`).
        """
        intended = await workers.run(self._begin, volume_id, changes)
        before = (intended.limits_before or intended.limits).value
        try:
            await self.enforcement.set_in_guests(volume_id, intended.limits.value, before)
        except errors.PeerUnavailable:
            raise
        except errors.CrustError:
            await workers.run(self._restore_limits, intended)
            raise
        if intended.limits_before is not None:
            done = intended.replaced(limits_before=None)
            await workers.run(self.stores.volume_records.save, done)

    def grow_image(self, volume_id: volumes.VolumeId, size_range: volumes.CapacityRange) -> None:
        """Grow the image alone, to a size of the range, for a CO that calls no ControllerExpandVolume. Blocks.

        Raises `models.VolumeNotFound`, VolumeSizeNotPossible, `OutOfCapacity`, `NobodyGrowsFilesystem`.
        """
        record = self.stores.volume_records.load(volume_id)
        if record.capacity_bytes < size_range.required_bytes:
            self._grow(record, size_range)

    async def finish_interrupted(self) -> None:
        """Finish changes of limits that a killed driver had recorded, and whose guests may not have them yet.

        If a change fails, the CO's retry finishes it. After a reboot of the node the proxy and the handlers start a
        while later, so this tries several times.
        """
        call, no_changes = "ControllerModifyVolume", ()
        unfinished = list(await workers.run(self.interrupted))
        for pause_s in (0.0, *_PAUSES_S):
            await asyncio.sleep(pause_s)
            again = []
            for volume_id in unfinished:
                extra: dict[str, object] = {"volume_id": volume_id}
                modify = partial(self.modify, volume_id, no_changes)
                try:
                    await self.stores.running.run(volume_id, call, no_changes, modify)
                    _log.info("finished a change of limits", extra=extra)
                except errors.CrustError as err:
                    _log.warning("a change of limits is unfinished", extra={**extra, "error": err})
                    if isinstance(err, _AGAIN):
                        again.append(volume_id)
            unfinished = again
            if not unfinished:
                return

    def interrupted(self) -> tuple[volumes.VolumeId, ...]:
        """Volumes with an interrupted change of limits that a guest may not have. Blocks."""
        interrupted = []
        for volume_id in self.stores.access.attached_here():
            try:
                targets = self.stores.node_state.deferred_targets(volume_id)
                record = self.stores.volume_records.find(volume_id) if targets else None
            except UNREADABLE:  # it is reported, and changes of other volumes do not wait for it
                continue
            if record is not None and record.limits_before is not None:
                interrupted.append(volume_id)
        return tuple(interrupted)

    def _begin(
        self, volume_id: volumes.VolumeId, changes: class_parameters.Changes
    ) -> VolumeRecord:
        """Record the limits, and enforce them on this host; returns the record, for the guests."""
        record = self.stores.volume_records.load(volume_id)
        limits = replace(record.limits.value, **dict(changes))
        self.stores.provisioning.check_image(volume_id)
        self.enforcement.check_limits(volume_id, limits)
        if limits != record.limits.value:
            # Only guests may miss an interrupted change: on this host the start has made it.
            deferred = self.stores.node_state.deferred_targets(volume_id)
            before = (record.limits_before if deferred else None) or record.limits
            record = record.replaced(limits=Limits(**asdict(limits)), limits_before=before)
            record = self.stores.volume_records.save(record)
        try:
            self.enforcement.set_on_host(volume_id, limits)
        except errors.CrustError:
            self._restore_limits(record)
            raise
        return record

    def expand(
        self,
        volume_id: volumes.VolumeId,
        size_range: volumes.CapacityRange,
        capability: volumes.VolumeCapability | None = None,
    ) -> tuple[int, bool]:
        """Grow image and device, attached or not; a large enough volume is a success. Returns the volume's size, and
        whether NodeExpandVolume is needed.

        Raises `models.VolumeNotFound`, `ImageMissing`, `capability_check.CapabilityNotSupported`, `AboveLimit`,
        VolumeSizeNotPossible, `OutOfCapacity`. Blocks.
        """
        record = self.stores.volume_records.load(volume_id)
        if capability is not None and (why := self.stores.supported.obstacle(capability)):
            raise capability_check.CapabilityNotSupported(why)
        self.stores.provisioning.check_image(volume_id)
        if record.capacity_bytes < size_range.required_bytes:
            record = self._grow(record, size_range)
        limit_bytes = size_range.limit_bytes
        if limit_bytes and record.capacity_bytes > limit_bytes:
            raise capability_check.AboveLimit(volume_id, record.capacity_bytes, limit_bytes)
        # Now, also for filesystems: a raw volume needs no NodeExpandVolume.
        self.stores.access.refresh(volume_id)
        if capability is not None:
            return record.capacity_bytes, isinstance(capability.access, volumes.MountAccess)
        return record.capacity_bytes, any(usage.kind == "mount" for usage in record.usages)

    def _grow(self, record: VolumeRecord, size_range: volumes.CapacityRange) -> VolumeRecord:
        is_always = record.parameters.get(deferral_keys.DEFER) == deferral_keys.Defer.ALWAYS.value
        if is_always and self.stores.content_records.load(record.volume_id).nobody_grows:
            raise errors.InvalidRequest.named(
                "NobodyGrowsFilesystem",
                f"{record.volume_id} cannot be expanded",
                why="only guests mount it (crust.dev/defer: always), and the runtime that last had it does not "
                "offer GROW",
            )
        maximum = self.stores.provisioning.maximum_bytes
        size_bytes = capacity.choose(size_range, minimum=record.capacity_bytes, maximum=maximum)
        volume_id = record.volume_id
        kind: capacity.Kind = "thick" if record.thick else "thin"
        reserved = self.stores.capacity.reserved(
            volume_id, size_bytes, kind=kind, present_bytes=record.capacity_bytes
        )
        with reserved:
            self.stores.provisioning.grow(volume_id, size_bytes, thick=record.thick)
            return self.stores.volume_records.save(record.replaced(capacity_bytes=size_bytes))

    def _restore_limits(self, intended: VolumeRecord) -> None:
        before = intended.limits_before or intended.limits
        record = self.stores.volume_records.save(
            intended.replaced(limits=before, limits_before=None)
        )
        volume_id = record.volume_id
        try:
            self.enforcement.set_on_host(volume_id, record.limits.value)
        except errors.CrustError as err:
            extra = {"volume_id": volume_id, "error": err}
            _log.error("the previous I/O limits could not be restored", extra=extra)


@dataclass(frozen=True, slots=True)
class EnforcedByStorage:
    """See `LimitEnforcement`."""

    set_on_host: SetLimits

    def check_limits(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """The storage takes every limit."""

    async def set_in_guests(
        self, volume_id: volumes.VolumeId, limits: volumes.IoLimits, before: volumes.IoLimits
    ) -> None:
        """Nothing: the storage limits a guest's disk."""
