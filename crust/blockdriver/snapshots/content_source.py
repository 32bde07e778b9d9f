"""The content source of a new volume: a snapshot, or another volume as it is now.

The new volume takes over what the driver knows of the content, so it is formatted only if its source never was, and
was never given to anyone. Its filesystem keeps the UUID of its source's (`duplicate_uuid`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from crust.blockdriver.engines.protocol import Making
from crust.blockdriver.records.models import (
    ContentRecord,
    ContentSource,
    Snapshot,
    Usage,
    VolumeRecord,
)
from crust.blockdriver.records.stores import Stores
from crust.blockdriver.snapshots import freezer, snapshot_sets
from crust.blockdriver.snapshots.snapshot_sets import SnapshotSets
from crust.core import errors, volumes
from crust.host.process import workers


@dataclass(frozen=True, slots=True)
class Wanted:
    """A volume_content_source."""

    kind: Literal["snapshot", "volume"]
    id: str


@dataclass(frozen=True, slots=True)
class ContentSources:
    """Finds content sources and copies them. The caller locks a volume that is one."""

    stores: Stores
    snapshot_sets: SnapshotSets

    def find(self, wanted: Wanted) -> ContentSource:
        """The source as it is now.

        Raises SnapshotNotFound, `models.VolumeNotFound`, `models.RecordMissing`, `ImageMissing`, `ForeignImage`.
        """
        if wanted.kind == "snapshot":
            _, found = self.snapshot_sets.find(wanted.id)
            return ContentSource(
                kind="snapshot",
                id=wanted.id,
                size_bytes=found.size_bytes,
                fs_type=_fs_type(found),
            )
        record = self.stores.volume_records.load(volumes.VolumeId(wanted.id))
        self.stores.provisioning.check_image(volumes.VolumeId(wanted.id))
        fs_type = _fs_type(self.stores.content_records.load(volumes.VolumeId(wanted.id)))
        return ContentSource(
            kind="volume", id=wanted.id, size_bytes=record.capacity_bytes, fs_type=fs_type
        )

    async def fill(self, making: Making, record: VolumeRecord) -> ContentRecord:
        """Give a volume that is being made its image; answers what is known of its bytes, not saved.

        Raises what `find` raises, the errors of `freezer.plan`, those of
        `Freezer.frozen`, `Exhausted`. A retry copies everything again.
        """
        source = record.content_source
        assert source is not None
        async with workers.long_work():
            if source.kind == "snapshot":
                # it cannot change, so any number of copies share it
                with self.stores.running.shared(source.id, "CreateVolume"):
                    return await workers.run(self._restore, making, record, source)
            source_id = volumes.VolumeId(source.id)
            moving = await workers.run(freezer.plan, self.stores, [source_id])
            async with self.snapshot_sets.freezer.frozen(moving.members):
                return await workers.run(self._clone, making, record, source_id)

    def _restore(
        self, making: Making, record: VolumeRecord, source: ContentSource
    ) -> ContentRecord:
        _, taken = self.snapshot_sets.find(source.id)
        making.restore(snapshot_sets.image_of(taken), record.capacity_bytes)
        return _filled(record.volume_id, taken)

    def _clone(
        self,
        making: Making,
        record: VolumeRecord,
        source_id: volumes.VolumeId,
    ) -> ContentRecord:
        source, known = (
            self.stores.volume_records.load(source_id),
            self.stores.content_records.load(source_id),
        )
        making.clone(
            source_id, source_bytes=source.capacity_bytes, size_bytes=record.capacity_bytes
        )
        # after the copy, and not only before: whoever is given the source is on record before
        if self.stores.content_records.load(source_id) != known:
            raise snapshot_sets.ContentChanged(source_id)
        return _filled(record.volume_id, known)


def sized(
    wanted: volumes.CapacityRange, usages: Iterable[Usage], source: ContentSource
) -> volumes.CapacityRange:
    """The size range for a volume with these usages and this source; raises SmallerThanSource, and
    SourceFilesystemDiffers for another filesystem than the source has.
    """
    for usage in usages:
        if source.fs_type and usage.kind == "mount" and usage.fs_type != source.fs_type:
            raise errors.InvalidRequest.named(
                "SourceFilesystemDiffers",
                f"the volume cannot have {usage.fs_type}",
                why=f"its source is formatted with {source.fs_type}",
                hint=f"request {source.fs_type}, or a volume without a content source",
            )
    asked = wanted.required_bytes or wanted.limit_bytes
    if asked and asked < source.size_bytes:
        raise errors.OutOfRange.named(
            "SmallerThanSource",
            f"a volume of {asked} bytes is too small for its source",
            why=f"the source has {source.size_bytes}",
            hint="request that size or more",
        )
    required = wanted.required_bytes or source.size_bytes
    return volumes.CapacityRange(required, wanted.limit_bytes)


def _fs_type(known: ContentRecord | Snapshot) -> str:
    return known.fs_type if known.state == "formatted" else ""


def _filled(volume_id: str, known: ContentRecord | Snapshot) -> ContentRecord:
    # Of a volume that guests format, "new" does not say that nobody has written it.
    of_guest = known.state == "new" and known.in_guest
    return ContentRecord(
        volume_id=volume_id,
        state="raw" if of_guest else known.state,
        fs_type=known.fs_type,
        planned_uuid=known.planned_uuid,
        filled_bytes=known.filled_bytes,
        in_guest=known.in_guest,
        generation=1,
    )
