"""What a new volume is made of, if not of zeros: a snapshot, or another volume as it is now.

The new volume takes over what the driver knew of the bytes, so it is formatted only if its source never was, and
nobody was ever given it. Its filesystem keeps the UUID of its source's (`duplicate_uuid`).
"""

import asyncio
from dataclasses import dataclass
from typing import Literal

from crust import errors, volumes
from crust.blockdriver.engines.protocol import Backend
from crust.blockdriver.records.snapshot_record import SnapshotRecord
from crust.blockdriver.records.volume_record import Content, ContentSource, Record
from crust.blockdriver.records.volume_records import VolumeRecords
from crust.blockdriver.snapshots import quiesce, take_snapshot
from crust.blockdriver.snapshots.guest_freeze import GuestFreezer
from crust.blockdriver.snapshots.host_freeze import Freezer
from crust.blockdriver.snapshots.quiesce import QuiescePlan, VolumeUse
from crust.blockdriver.snapshots.take_snapshot import VolumeSnapshots


class SmallerThanSource(errors.OutOfRange):
    """A volume that is to be smaller than what it is made of (CSI CreateVolume)."""

    def __init__(self, wanted_bytes: int, source_bytes: int) -> None:
        super().__init__(
            f"a volume of {wanted_bytes} bytes is too small for its source",
            why=f"that has {source_bytes}",
            hint="ask for that size or more",
        )
        self.wanted_bytes = wanted_bytes
        self.source_bytes = source_bytes


class SourceFilesystemDiffers(errors.InvalidRequest):
    """A volume that is to have another filesystem than what it is made of."""

    def __init__(self, wanted: str, present: str) -> None:
        super().__init__(
            f"the volume cannot have {wanted}",
            why=f"its source is formatted with {present}",
            hint=f"ask for {present}, or for a volume without a source",
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A volume_content_source."""

    kind: Literal["snapshot", "volume"]
    id: str


@dataclass(frozen=True, slots=True)
class ContentSources:
    """Finds sources, and copies them; the caller sees to it that nobody else operates on a source."""

    volume_records: VolumeRecords
    volume_snapshots: VolumeSnapshots
    backend: Backend
    node: VolumeUse
    freezer: Freezer
    guest_freezer: GuestFreezer

    def find(self, wanted: Wanted) -> ContentSource:
        """The source as it is now. Raises `take_snapshot.SnapshotNotFound`, `volume_records.VolumeNotFound`."""
        if wanted.kind == "snapshot":
            found = self.volume_snapshots.find(wanted.id)
            return ContentSource(
                kind="snapshot",
                id=wanted.id,
                size_bytes=found.size_bytes,
                fs_type=_fs_type(found.content, found.fs_type),
            )
        record = self.volume_records.load(volumes.VolumeId(wanted.id))
        fs_type = _fs_type(record.content, record.fs_type)
        return ContentSource(
            kind="volume", id=wanted.id, size_bytes=record.capacity_bytes, fs_type=fs_type
        )

    async def fill(self, record: Record, origin: ContentSource) -> Record:
        """Make the image of a new volume; answers its record with what is known of the bytes, not saved.

        Raises what `find` raises, the errors of `quiesce.check`, `freezes.FrozenTooLong`, those of
        `GuestFreezer.still`, `Exhausted`. What was copied by then is copied anew by the next try.
        """
        if origin.kind == "snapshot":
            return await asyncio.to_thread(self._restore, record, origin)
        source_id = volumes.VolumeId(origin.id)
        moving = await asyncio.to_thread(self._check, source_id)
        async with self.guest_freezer.still(moving.in_guests):
            return await asyncio.to_thread(self._clone, record, source_id, moving)

    def _check(self, source_id: volumes.VolumeId) -> QuiescePlan:
        return quiesce.check(self.node, [source_id], at_once=self.backend.copies_at_once())

    def _restore(self, record: Record, origin: ContentSource) -> Record:
        taken = self.volume_snapshots.find(origin.id)
        image = take_snapshot.image_of(taken)
        volume_id = volumes.VolumeId(record.volume_id)
        self.backend.restore(volume_id, image, record.capacity_bytes)
        return _filled(record, taken)

    def _clone(self, record: Record, source_id: volumes.VolumeId, moving: QuiescePlan) -> Record:
        source = self.volume_records.load(source_id)
        volume_id = volumes.VolumeId(record.volume_id)
        with self.freezer.frozen(moving.here):
            self.backend.clone(
                volume_id,
                source_id,
                source_bytes=source.capacity_bytes,
                size_bytes=record.capacity_bytes,
            )
        return _filled(record, source)


def least_bytes(
    wanted: volumes.CapacityRange, origin: ContentSource | None
) -> volumes.CapacityRange:
    """The range for a volume that holds its source; raises `SmallerThanSource`."""
    if origin is None:
        return wanted
    asked = wanted.required_bytes or wanted.limit_bytes
    if asked and asked < origin.size_bytes:
        raise SmallerThanSource(asked, origin.size_bytes)
    required = wanted.required_bytes or origin.size_bytes
    return volumes.CapacityRange(required, wanted.limit_bytes)


def check_filesystems(record: Record) -> None:
    """Raise `SourceFilesystemDiffers` if the record plans another filesystem than its source has."""
    present = record.origin.fs_type if record.origin else ""
    for usage in record.usages:
        if present and usage.kind == "mount" and usage.fs_type != present:
            raise SourceFilesystemDiffers(usage.fs_type, present)


def _fs_type(content: Content, fs_type: str) -> str:
    return fs_type if content == "formatted" else ""


def _filled(record: Record, source: Record | SnapshotRecord) -> Record:
    return record.but(
        content=source.content,
        fs_type=source.fs_type,
        filled_bytes=source.filled_bytes,
        in_guest=source.in_guest,
        generation=record.generation + 1,
    )
