"""ControllerExpandVolume and ControllerModifyVolume: one change of a volume at a time, ordered by its key.

The image grows first, then size and limits go into the record in one write, then the limits are enforced: on this
host if the volume is published here, in its guest if it is deferred. Size and limits have separate outcomes: a size
that is not possible does not stop the limits.

A change of limits happens atomically. Everything that can be checked is checked before the first write. The record
then holds the new limits and, until they are enforced everywhere, the previous ones: a refusal restores those, also
after a crash in between, when the caller's retry continues. While a guest is unreachable its state is unknown: the
intent stays, the answer is UNAVAILABLE, and a retry finishes it.

I/O limits where the storage keeps them itself: neither this host nor a guest is asked.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from crust.blockdriver.controller import capacity, class_parameters
from crust.blockdriver.controller.capacity import PoolCapacity
from crust.blockdriver.controller.node_part import LimitEnforcement, NodeVolumes
from crust.blockdriver.engines.protocol import Provisioning, StorageLimits
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.models import Limits, VolumeRecord
from crust.blockdriver.records.records import UNREADABLE, IndexedRecords
from crust.core import errors, operations, volumes
from crust.host.process import workers

_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Pauses between the tries of a start to reach guests. Each try locks the volume."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Expansion:
    """The requested size, and the capability that it is for."""

    wanted: volumes.CapacityRange
    capability: volumes.VolumeCapability | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """The requested changes. None: no change of that kind."""

    limits: class_parameters.Changes | None = None
    expansion: Expansion | None = None


@dataclass(frozen=True, slots=True)
class Expanded:
    """A volume's size after an expansion, and whether NodeExpandVolume is needed."""

    capacity_bytes: int
    node_expansion_required: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcomes of size and limits."""

    expanded: Expanded | errors.CrustError | None = None
    unmodified: errors.CrustError | None = None
    """Why the limits were not changed; None if they were."""


@dataclass(frozen=True, slots=True)
class VolumeModifier:
    """Changes volumes. The caller makes one call per volume at a time."""

    volume_records: IndexedRecords[VolumeRecord]
    provisioning: Provisioning
    node: NodeVolumes
    enforcement: LimitEnforcement
    capacity: PoolCapacity
    supported: SupportedCapabilities

    async def apply(self, volume_id: volumes.VolumeId, change: Change) -> Outcome:
        """Make the change. Raises `models.VolumeNotFound`; other errors are in the outcome."""
        outcome, intended = await workers.run(self._begin, volume_id, change)
        if intended is None:
            return outcome
        before = (intended.limits_before or intended.limits).value
        try:
            await self.enforcement.set_in_guests(volume_id, intended.limits.value, before)
        except errors.PeerUnavailable as err:
            return replace(outcome, unmodified=err)
        except errors.CrustError as err:
            await workers.run(self._restore_limits, intended)
            return replace(outcome, unmodified=err)
        await workers.run(self._finish, intended)
        return outcome

    def grow_image(self, volume_id: volumes.VolumeId, wanted: volumes.CapacityRange) -> None:
        """Grow the image alone, to a size of the range, for a CO that calls no ControllerExpandVolume. Blocks.

        Raises `models.VolumeNotFound`, `capacity.VolumeSizeNotPossible`, `OutOfCapacity`.
        """
        record = self.volume_records.load(volume_id)
        if record.capacity_bytes < wanted.required_bytes:
            self._grow(record, wanted)

    def interrupted(self) -> tuple[volumes.VolumeId, ...]:
        """Volumes with an interrupted change of limits that a guest may not have. Blocks."""
        return tuple(each for each in self.node.attached_ids() if self._is_interrupted(each))

    def _is_interrupted(self, volume_id: volumes.VolumeId) -> bool:
        try:
            if not self.node.deferred_targets(volume_id):
                return False
            record = self.volume_records.find(volume_id)
        except UNREADABLE:  # reported, and other volumes' changes do not wait for it
            return False
        return record is not None and record.limits_before is not None

    def _begin(
        self, volume_id: volumes.VolumeId, change: Change
    ) -> tuple[Outcome, VolumeRecord | None]:
        """Record the change and make it on this host; returns the record if guests need its limits."""
        record = self.volume_records.load(volume_id)
        wanted, unmodified = self._with_limits(record, change)
        expanded: Expanded | errors.CrustError | None = None
        if change.expansion is not None:
            wanted, expanded = self._expand(wanted, change.expansion)
        if wanted != self.volume_records.load(volume_id):
            self.volume_records.save(wanted)
        if change.limits is None or unmodified is not None:
            return Outcome(expanded, unmodified), None
        try:
            self.enforcement.set_on_host(volume_id, wanted.limits.value)
        except errors.CrustError as err:
            self._restore_limits(wanted)
            return Outcome(expanded, err), None
        return Outcome(expanded), wanted

    def _with_limits(
        self, record: VolumeRecord, change: Change
    ) -> tuple[VolumeRecord, errors.CrustError | None]:
        """The record of what is intended; or as it was, and why the limits cannot be held."""
        if change.limits is None:
            return record, None
        volume_id = volumes.VolumeId(record.volume_id)
        limits = class_parameters.changed(record.limits.value, change.limits)
        try:
            self.provisioning.check_image(volume_id)
            self.enforcement.check(volume_id, limits)
        except errors.CrustError as err:
            return record, err
        if limits == record.limits.value:
            return record, None
        # An interrupted change is unknown only to guests: on this host the start has made it.
        deferred = self.node.deferred_targets(volume_id)
        before = (record.limits_before if deferred else None) or record.limits
        return record.but(limits=Limits.of(limits), limits_before=before), None

    def _expand(
        self, record: VolumeRecord, expansion: Expansion
    ) -> tuple[VolumeRecord, Expanded | errors.CrustError]:
        """Grow image and device, attached or not; large enough is a success."""
        volume_id, wanted = volumes.VolumeId(record.volume_id), expansion.wanted
        try:
            self._check_expansion(volume_id, expansion)
            if record.capacity_bytes < wanted.required_bytes:
                record = self._grow(record, wanted)
            if wanted.limit_bytes and record.capacity_bytes > wanted.limit_bytes:
                raise capability_check.AboveLimit(
                    volume_id, record.capacity_bytes, wanted.limit_bytes
                )
            # Now, also for filesystems: a raw volume needs no NodeExpandVolume.
            self.node.refresh(volume_id)
        except errors.CrustError as err:
            return record, err
        needs_node = _has_filesystem(record, expansion.capability)
        return record, Expanded(record.capacity_bytes, needs_node)

    def _check_expansion(self, volume_id: volumes.VolumeId, expansion: Expansion) -> None:
        capability = expansion.capability
        if capability is not None and (why := self.supported.obstacle(capability)):
            raise capability_check.CapabilityNotSupported(why)
        self.provisioning.check_image(volume_id)

    def _grow(self, record: VolumeRecord, wanted: volumes.CapacityRange) -> VolumeRecord:
        maximum = self.provisioning.maximum_bytes()
        size_bytes = capacity.choose(wanted, minimum=record.capacity_bytes, maximum=maximum)
        volume_id = volumes.VolumeId(record.volume_id)
        with self.capacity.reserved(volume_id, size_bytes):
            self.provisioning.grow(volume_id, size_bytes)
            return self.volume_records.save(record.but(capacity_bytes=size_bytes))

    def _finish(self, intended: VolumeRecord) -> None:
        if intended.limits_before is not None:
            self.volume_records.save(intended.but(limits_before=None))

    def _restore_limits(self, intended: VolumeRecord) -> None:
        before = intended.limits_before or intended.limits
        record = self.volume_records.save(intended.but(limits=before, limits_before=None))
        volume_id = volumes.VolumeId(record.volume_id)
        try:
            self.enforcement.set_on_host(volume_id, record.limits.value)
        except errors.CrustError as err:
            extra = {"volume_id": volume_id, "error": err}
            _log.error("the previous I/O limits could not be restored", extra=extra)


@dataclass(frozen=True, slots=True)
class InterruptedChanges:
    """Changes of limits that a killed driver had recorded, and whose guests may not have them yet."""

    driver: volumes.DriverName
    running: operations.KeyedOperations
    interrupted: Callable[[], tuple[volumes.VolumeId, ...]]
    """Blocks."""
    apply: Callable[[volumes.VolumeId, Change], Coroutine[Any, Any, Outcome]]

    async def finish(self) -> None:
        """Finish them; those that fail are left to the CO's retry.

        After a reboot of the node the proxy and the handlers start a while later, so this tries several times.
        """
        left = await workers.run(self.interrupted)
        for pause_s in (0.0, *_PAUSES_S):
            await asyncio.sleep(pause_s)
            left = tuple([each for each in left if not await self._finish(each)])
            if not left:
                return

    async def _finish(self, volume_id: volumes.VolumeId) -> bool:
        """Whether the outcome is final; not while a guest is unreachable, or another operation has the volume."""
        key, change = volumes.VolumeKey(self.driver, volume_id), Change(limits=())
        try:
            outcome = await self.running.run(
                key,
                "ControllerModifyVolume",
                change,
                lambda: self.apply(volume_id, change),
            )
            unmodified = outcome.unmodified
        except errors.CrustError as err:
            unmodified = err
        if unmodified is None:
            _log.info("finished a change of limits", extra={"volume_id": volume_id})
            return True
        extra = {"volume_id": volume_id, "error": unmodified}
        _log.warning("a change of limits is unfinished", extra=extra)
        return not isinstance(unmodified, errors.PeerUnavailable | errors.OperationPending)


def _has_filesystem(record: VolumeRecord, capability: volumes.VolumeCapability | None) -> bool:
    if capability is not None:
        return isinstance(capability.access, volumes.MountAccess)
    return any(usage.kind == "mount" for usage in record.usages)


@dataclass(frozen=True, slots=True)
class EnforcedByStorage:
    """See `node_part.LimitEnforcement`."""

    limits: StorageLimits

    def check(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """The storage takes every limit."""

    def set_on_host(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """Set them in the storage."""
        self.limits.set_limits(volume_id, limits)

    async def set_in_guests(
        self, volume_id: volumes.VolumeId, limits: volumes.IoLimits, before: volumes.IoLimits
    ) -> None:
        """Nothing: a guest's disk is limited by the storage."""
