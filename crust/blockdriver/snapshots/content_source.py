"""The content source of a new volume: a snapshot, or another volume in its present state.

The new volume takes over the content record, so the driver formats it only if its source was never formatted, and
never given to a node. Its filesystem keeps the UUID of the source's filesystem (`duplicate_uuid`).

It keeps the protection of its source: content that no host may parse is restored into no volume that a host may
mount. LUKS is a layer of the content, which no copy adds or removes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from crust.blockdriver.engines.protocol import NewVolume
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
from crust.core import deferral_keys, errors, volumes
from crust.host.process import workers


@dataclass(frozen=True, slots=True)
class SourceRequest:
    kind: Literal["snapshot", "volume"]
    id: str


@dataclass(frozen=True, slots=True)
class ContentSources:
    """Finds content sources and copies them. The caller locks the source volume."""

    stores: Stores
    snapshot_sets: SnapshotSets

    def find(self, requested: SourceRequest) -> ContentSource:
        """The source in its present state.

        Raises SnapshotNotFound, `models.VolumeNotFound`, `models.RecordMissing`, `ImageMissing`, `ForeignImage`.
        """
        content: ContentRecord | Snapshot
        if requested.kind == "snapshot":
            _, content = self.snapshot_sets.find(requested.id)
            size_bytes = content.size_bytes
        else:
            volume_id = volumes.VolumeId(requested.id)
            size_bytes = self.stores.volume_records.load(volume_id).capacity_bytes
            self.stores.provisioning.check_image(volume_id)
            content = self.stores.content_records.load(volume_id)
        return ContentSource(
            kind=requested.kind,
            id=requested.id,
            size_bytes=size_bytes,
            fs_type=content.fs_type if content.state == "formatted" else "",
            format_in=content.format_in,
        )

    async def fill(self, making: NewVolume, record: VolumeRecord) -> ContentRecord:
        """Give a volume that is being made its image; returns its content record, which is not saved.

        Raises `Exhausted`, and the errors of `find`, `freezer.plan` and `Freezer.frozen`. A retry copies everything
        again.
        """
        source = record.content_source
        assert source is not None
        async with workers.long_work(workers.LongWork.COPY):
            if source.kind == "snapshot":
                # it cannot change, so any number of copies share it
                with self.stores.running.shared(source.id, "CreateVolume"):
                    return await workers.run(self._copy, making, record, source)
            source_id = volumes.VolumeId(source.id)
            quiesce = await workers.run(freezer.plan, self.stores, [source_id])
            async with self.snapshot_sets.freezer.frozen(quiesce.members):
                return await workers.run(self._copy, making, record, source)

    def _copy(
        self, making: NewVolume, record: VolumeRecord, source: ContentSource
    ) -> ContentRecord:
        content: ContentRecord | Snapshot
        if source.kind == "snapshot":
            _, content = self.snapshot_sets.find(source.id)
            making.restore(snapshot_sets.image_of(content), record.capacity_bytes)
        else:
            source_id = volumes.VolumeId(source.id)
            source_bytes = self.stores.volume_records.load(source_id).capacity_bytes
            content = self.stores.content_records.load(source_id)
            making.clone(source_id, source_bytes=source_bytes, size_bytes=record.capacity_bytes)
            # after the copy, and not only before: the record names a node before the node gets the source
            if self.stores.content_records.load(source_id) != content:
                raise snapshot_sets.ContentChanged(source_id)
        # If guests format the volume, "new" does not mean that nobody has written it.
        of_guest = content.state == "new" and content.in_guest
        return ContentRecord(
            volume_id=record.volume_id,
            format_in=deferral_keys.format_in(record.parameters),
            state="raw" if of_guest else content.state,
            fs_type=content.fs_type,
            planned_uuid=content.planned_uuid,
            filled_bytes=content.filled_bytes,
            in_guest=content.in_guest,
            generation=1,
        )


_SHOWN: Mapping[deferral_keys.FormatIn, str] = {
    "host": "a filesystem that hosts mount",
    "guest": "a filesystem that only guests parse",
    "luks": "a LUKS container that only guests open",
}


def sized(
    size_range: volumes.CapacityRange,
    usages: Iterable[Usage],
    source: ContentSource,
    format_in: deferral_keys.FormatIn,
) -> volumes.CapacityRange:
    """The size range for a new volume with this source.

    Raises SourceProtectionDiffers unless the volume protects the content as its source does, SourceFilesystemDiffers,
    SmallerThanSource.
    """
    if format_in != source.format_in and (source.format_in, format_in) != ("host", "guest"):
        raise errors.InvalidRequest.named(
            "SourceProtectionDiffers",
            "the volume cannot be made from its source",
            why=f"the source has {_SHOWN[source.format_in]}, and the volume would have {_SHOWN[format_in]}",
            hint=f"use a StorageClass with the {deferral_keys.FORMAT_IN} and {deferral_keys.ENCRYPTION} of the "
            "source's",
        )
    for usage in usages:
        if source.fs_type and usage.kind == "mount" and usage.fs_type != source.fs_type:
            raise errors.InvalidRequest.named(
                "SourceFilesystemDiffers",
                f"the volume cannot have {usage.fs_type}",
                why=f"its source is formatted with {source.fs_type}",
                hint=f"request {source.fs_type}, or a volume without a content source",
            )
    bytes_asked = size_range.required_bytes or size_range.limit_bytes
    if bytes_asked and bytes_asked < source.size_bytes:
        raise errors.OutOfRange.named(
            "SmallerThanSource",
            f"a volume of {bytes_asked} bytes is too small for its source",
            why=f"the source has {source.size_bytes}",
        )
    required = size_range.required_bytes or source.size_bytes
    return volumes.CapacityRange(required, size_range.limit_bytes)
