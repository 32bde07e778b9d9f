"""ControllerExpandVolume and ControllerModifyVolume: one application of whatever is to change of a volume.

The image grows first, then size and limits go into the record in one write, then the limits are set: on this host if
the volume is published here, in its guest if it is deferred. Each half is answered for itself: a size that is not
possible is no reason to refuse the limits.

A change of limits happens whole or not at all. What can be known to fail is asked before anything is written. The
record then says what is intended and, until it is in force everywhere, what held before: a refusal on the way takes
all of it back, also after a crash in between, when the caller's retry carries on. While a guest is out of reach
nothing is known of it: the intent stays, the answer is UNAVAILABLE, and a retry finishes it.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace

from crust import errors, volumes
from crust.blockdriver.controller import capacity, io_limit_parameters, volume_size
from crust.blockdriver.engines.protocol import ImageMissing
from crust.blockdriver.node import io_limits, node_expand
from crust.blockdriver.node.state import State
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.volume_record import UNREADABLE, Limits, Record

_log = logging.getLogger(__name__)


class PublishInProgress(errors.OperationPending):
    """The runtime does not know a publish that this driver granted: it is just being made, or taken back."""

    def __init__(self, volume_id: str, target: str) -> None:
        super().__init__(
            f"{volume_id} is not modified",
            why=f"it is deferred at {target}, and the node's proxy has no record of that at this moment",
            hint="retry when the publish or unpublish has ended",
        )
        self.volume_id = volume_id
        self.target = target


@dataclass(frozen=True, slots=True)
class Expansion:
    """The size that is wanted, and for which use."""

    wanted: volumes.CapacityRange
    capability: volumes.VolumeCapability | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What is to change. None: nothing was asked of that half."""

    limits: io_limit_parameters.Changes | None = None
    expansion: Expansion | None = None


@dataclass(frozen=True, slots=True)
class Expanded:
    """A volume's size after an expansion, and whether the node has something left to do."""

    capacity_bytes: int
    node_expansion_required: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of each half."""

    expanded: Expanded | errors.CrustError | None = None
    unmodified: errors.CrustError | None = None
    """Why the limits are what they were; None when they are what was asked for."""


@dataclass(frozen=True, slots=True)
class _Intended:
    """Limits that are on record and set on this host, and the targets whose guests are to be told."""

    record: Record
    targets: tuple[volumes.TargetPath, ...]

    @property
    def before(self) -> Limits:
        return self.record.limits_before or self.record.limits


class VolumeModifier:
    """Changes volumes; one call per volume at a time is the caller's business."""

    def __init__(self, shared: State, room: capacity.PoolCapacity) -> None:
        self._state = shared
        self._capacity = room

    async def apply(self, volume_id: volumes.VolumeId, change: Change) -> Outcome:
        """Make the change. Raises `volume_records.VolumeNotFound`; all else is in the outcome, half by half."""
        outcome, intended = await asyncio.to_thread(self._begin, volume_id, change)
        if intended is None:
            return outcome
        why = await self._tell_guests(intended)
        if isinstance(why, errors.PeerUnavailable):
            return replace(outcome, unmodified=why)
        end = self._finish if why is None else self._take_back
        await asyncio.to_thread(end, intended)
        return replace(outcome, unmodified=why)

    def cut_short(self) -> tuple[volumes.VolumeId, ...]:
        """Volumes whose limits were changed by an earlier life, and whose guests may not know. Blocks."""
        return tuple(
            each for each in self._state.backend.attached_here() if self._is_cut_short(each)
        )

    def _is_cut_short(self, volume_id: volumes.VolumeId) -> bool:
        if not self._deferred_at(volume_id):
            return False
        try:
            record = self._state.volume_records.find(volume_id)
        except UNREADABLE:  # told with the volume's health
            return False
        return record is not None and record.limits_before is not None

    def _begin(
        self, volume_id: volumes.VolumeId, change: Change
    ) -> tuple[Outcome, _Intended | None]:
        record = self._state.volume_records.load(volume_id)
        wanted, unmodified = self._with_limits(record, change)
        expanded: Expanded | errors.CrustError | None = None
        if change.expansion is not None:
            wanted, expanded = self._expand(wanted, change.expansion)
        if wanted != self._state.volume_records.load(volume_id):
            self._state.volume_records.save(wanted)
        if change.limits is None or unmodified is not None:
            return Outcome(expanded, unmodified), None
        intended = _Intended(wanted, self._deferred_at(volume_id))
        try:
            self._set_here(wanted)
        except errors.CrustError as err:
            self._take_back(intended)
            return Outcome(expanded, err), None
        return Outcome(expanded), intended

    def _with_limits(
        self, record: Record, change: Change
    ) -> tuple[Record, errors.CrustError | None]:
        """The record of what is intended; or as it was, and why the limits cannot be held."""
        if change.limits is None:
            return record, None
        limits = io_limit_parameters.changed(record.io_limits, change.limits)
        deferred = self._deferred_at(volumes.VolumeId(record.volume_id))
        try:
            if deferred:
                self._state.guests.check()
            if limits != io_limits.NONE and self._is_on_host(record):
                self._state.throttle.check()
        except errors.CrustError as err:
            return record, err
        if limits == record.io_limits:
            return record, None
        # Of a change that was cut short only guests may not know: on this host the start has made it.
        before = (record.limits_before if deferred else None) or record.limits
        return record.but(limits=Limits.of(limits), limits_before=before), None

    def _expand(
        self, record: Record, expansion: Expansion
    ) -> tuple[Record, Expanded | errors.CrustError]:
        """Grow image and device, attached or not; large enough already is fine."""
        volume_id, wanted = volumes.VolumeId(record.volume_id), expansion.wanted
        try:
            self._check_expansion(volume_id, expansion)
            if record.capacity_bytes < wanted.required_bytes:
                record = self._grow(record, wanted)
            if wanted.limit_bytes and record.capacity_bytes > wanted.limit_bytes:
                raise node_expand.AboveLimit(volume_id, record.capacity_bytes, wanted.limit_bytes)
            # At once, also for filesystems: a raw volume needs no more.
            self._state.backend.refresh(volume_id)
        except errors.CrustError as err:
            return record, err
        needs_node = _has_filesystem(record, expansion.capability)
        return record, Expanded(record.capacity_bytes, needs_node)

    def _check_expansion(self, volume_id: volumes.VolumeId, expansion: Expansion) -> None:
        capability, backend = expansion.capability, self._state.backend
        if capability is not None and (
            why := capability_check.obstacle(
                capability, modes=backend.modes, fs_types=self._state.fs_types
            )
        ):
            raise capability_check.CapabilityNotSupported(why)
        if not backend.exists(volume_id):
            raise ImageMissing(volume_id)

    def _grow(self, record: Record, wanted: volumes.CapacityRange) -> Record:
        maximum = self._state.backend.maximum_bytes()
        size_bytes = volume_size.choose(wanted, minimum=record.capacity_bytes, maximum=maximum)
        volume_id = volumes.VolumeId(record.volume_id)
        with self._capacity.reserved(volume_id, size_bytes):
            self._state.backend.grow(volume_id, size_bytes)
            return self._state.volume_records.save(record.but(capacity_bytes=size_bytes))

    def _set_here(self, record: Record) -> None:
        attachment = self._state.backend.attached(volumes.VolumeId(record.volume_id))
        if attachment is not None and attachment.device is not None:
            io_limits.settle(self._state, record, attachment)

    async def _tell_guests(self, intended: _Intended) -> errors.CrustError | None:
        """Why not every guest has the limits, with those that have them given the old ones again."""
        told: list[volumes.TargetPath] = []
        for target in intended.targets:
            try:
                await self._state.guests.set_limits(target, intended.record.io_limits)
            except errors.PeerUnavailable as err:
                return err
            except errors.CrustError as err:
                for each in told:
                    with contextlib.suppress(errors.CrustError):
                        await self._state.guests.set_limits(each, intended.before.value)
                gone = isinstance(err, errors.NotFound)
                volume_id = intended.record.volume_id
                return PublishInProgress(volume_id, target.text) if gone else err
            told.append(target)
        return None

    def _finish(self, intended: _Intended) -> None:
        if intended.record.limits_before is not None:
            self._state.volume_records.save(intended.record.but(limits_before=None))

    def _take_back(self, intended: _Intended) -> None:
        record = intended.record.but(limits=intended.before, limits_before=None)
        self._state.volume_records.save(record)
        try:
            self._set_here(record)
        except errors.CrustError as err:
            told = {"volume_id": record.volume_id, "error": str(err)}
            _log.error("the I/O limits are not what they were", extra=told)

    def _deferred_at(self, volume_id: volumes.VolumeId) -> tuple[volumes.TargetPath, ...]:
        entries = self._state.node_state.published_of(volume_id)
        return tuple(volumes.TargetPath(each.target) for each in entries if each.deferred)

    def _is_on_host(self, record: Record) -> bool:
        live = self._state.live_publishes(volumes.VolumeId(record.volume_id))
        return any(not each.deferred for each in live)


def _has_filesystem(record: Record, capability: volumes.VolumeCapability | None) -> bool:
    if capability is not None:
        return isinstance(capability.access, volumes.MountAccess)
    return any(usage.kind == "mount" for usage in record.usages)
