"""CreateVolume, DeleteVolume.

Create writes the volume record in phase "creating", then makes the image, then writes the content record, then phase
"ready". The id is derived from the name, so a retry after a crash at any line continues the work; and an incomplete
volume can be deleted. Delete writes phase "deleting", then removes the image, the content record and the volume
record. An image without a record is never overwritten.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from crust.blockdriver.controller import capacity, class_parameters, topology
from crust.blockdriver.controller.capacity import PoolCapacity
from crust.blockdriver.controller.node_part import NodeVolumes
from crust.blockdriver.engines.protocol import (
    ForeignImage,
    Provisioning,
    StillAttached,
    StorageLimits,
)
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.models import (
    ContentRecord,
    ContentSource,
    Limits,
    VolumeRecord,
)
from crust.blockdriver.records.pool import Pool
from crust.blockdriver.records.records import Records
from crust.blockdriver.snapshots import content_source
from crust.blockdriver.snapshots.content_source import ContentSources
from crust.core import errors, volumes
from crust.host.process import workers


class VolumeExistsDifferently(errors.Conflict):
    """A volume of this name exists with other properties than requested."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"the volume {name!r} exists already",
            why=f"its request differs in {what}",
            hint="choose another name, or delete the volume first",
        )
        self.name = name


@dataclass(frozen=True, slots=True)
class Create:
    """A decoded CreateVolumeRequest; `parameters` as they were sent, `limits` from mutable_parameters."""

    name: str
    wanted: volumes.CapacityRange
    capabilities: tuple[volumes.VolumeCapability, ...]
    parameters: tuple[tuple[str, str], ...] = ()
    accessibility: topology.Requirement = topology.ANYWHERE
    source: content_source.Wanted | None = None
    limits: class_parameters.Changes = ()


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume as a CO sees it."""

    volume_id: volumes.VolumeId
    capacity_bytes: int
    context: dict[str, str] = field(default_factory=dict)
    source: content_source.Wanted | None = None


@dataclass(frozen=True, slots=True)
class Provisioner:
    """Creates and deletes volumes. The caller makes one call per volume at a time."""

    pool: Pool
    volume_records: Records[VolumeRecord]
    content_records: Records[ContentRecord]
    provisioning: Provisioning
    node: NodeVolumes
    sources: ContentSources
    capacity: PoolCapacity
    supported: SupportedCapabilities
    segment: str
    """The value of this node's topology segment; empty where every node reaches the pool."""
    limits: StorageLimits | None = None
    """For I/O limits that the storage keeps."""

    async def create(self, request: Create) -> Volume:
        """Create the volume; created already is a success.

        Raises `capability_check.CapabilityNotSupported`, `class_parameters.UnknownParameter`,
        `class_parameters.InvalidParameter`, `VolumeSizeNotPossible`, `VolumeExistsDifferently`, `OrphanImage`,
        `topology.TopologyNotAccessible`, `OutOfCapacity`; `ImageMissing`, `ForeignImage` for a volume that
        was created already and whose image is gone: it is never recreated under the name that stands for its data.
        """
        record = await workers.run(self._create, request)
        if record.phase == "creating":
            record = await self._finish_create(record)
        return describe(record)

    def _create(self, request: Create) -> VolumeRecord:
        """All of a create but the copy from a content source, for which a guest may have to be frozen."""
        read = class_parameters.parse(dict(request.parameters), self.supported.fs_types)
        for capability in request.capabilities:
            if why := self.supported.obstacle(capability):
                raise capability_check.CapabilityNotSupported(why)
        present = self._present(self.pool.ids.volume_id(request.name))
        wanted = self._plan(request, read, self._content_source(request, present))
        accessible = topology.is_met(request.accessibility, self.segment)
        if present is None and not accessible:
            raise topology.TopologyNotAccessible(self.segment)
        if present is None:
            present = self._begin(request, wanted)
        if not accessible:
            raise VolumeExistsDifferently(request.name, "accessibility_requirements")
        _check_same(present, wanted, request.wanted)
        if present.phase == "ready":
            self.provisioning.check_image(volumes.VolumeId(present.volume_id))
            return present
        return present if present.content_source is not None else self._make(present)

    def _present(self, volume_id: volumes.VolumeId) -> VolumeRecord | None:
        present = self.volume_records.find(volume_id)
        if present is None or not self._is_obsolete(present):
            return present
        self._discard(present)
        return None

    def _is_obsolete(self, record: VolumeRecord) -> bool:
        """Whether it is being deleted, or is an incomplete copy of a source whose size or filesystem has changed."""
        if record.phase != "creating" or record.content_source is None:
            return record.phase == "deleting"
        try:
            now = self.sources.find(
                content_source.Wanted(record.content_source.kind, record.content_source.id)
            )
        except errors.NotFound:
            return False  # the copy reports it
        return now != record.content_source

    def _content_source(
        self, request: Create, present: VolumeRecord | None
    ) -> ContentSource | None:
        """The content source; that of an incomplete volume is in its record, and may have been deleted since."""
        if request.source is None:
            return None
        known = present.content_source if present else None
        if known is not None and (known.kind, known.id) == (request.source.kind, request.source.id):
            return known
        if present is not None:
            raise VolumeExistsDifferently(request.name, "volume_content_source")
        return self.sources.find(request.source)

    def _plan(
        self, request: Create, read: class_parameters.Parameters, source: ContentSource | None
    ) -> VolumeRecord:
        """The record of the requested volume, with its minimum size."""
        fs_type = read.fs_type or (source.fs_type if source else "")
        usages = capability_check.usages_of(request.capabilities, fs_type)
        fs_types = {usage.fs_type for usage in usages if usage.kind == "mount"}
        return VolumeRecord(
            volume_id=self.pool.ids.volume_id(request.name),
            name=request.name,
            phase="creating",
            capacity_bytes=capacity.minimum_bytes(fs_types),
            parameters=read.kept,
            usages=usages,
            content_source=source,
            limits=Limits.of(class_parameters.changed(read.limits, request.limits)),
        )

    def _begin(self, request: Create, wanted: VolumeRecord) -> VolumeRecord:
        volume_id = volumes.VolumeId(wanted.volume_id)
        maximum = self.provisioning.maximum_bytes()
        content_source.check_filesystems(wanted)
        asked = content_source.least_bytes(request.wanted, wanted.content_source)
        size_bytes = capacity.choose(asked, minimum=wanted.capacity_bytes, maximum=maximum)
        with self.capacity.reserved(volume_id, size_bytes):
            if self.provisioning.exists(volume_id):
                raise errors.Corrupt.named(
                    "OrphanImage",
                    f"{volume_id} is not created",
                    why="an image of that id exists without a record of a volume",
                    hint=(
                        "find out whose data it is, and move it elsewhere (in a Ceph pool: `rbd "
                        "rename`); nothing was changed"
                    ),
                )
            self.content_records.remove(volume_id)  # its image does not exist any more
            return self.volume_records.save(wanted.but(capacity_bytes=size_bytes))

    def _make(self, record: VolumeRecord) -> VolumeRecord:
        volume_id = volumes.VolumeId(record.volume_id)
        with self._nothing_kept_if_full(record):
            self.provisioning.create(volume_id, record.capacity_bytes)
            return self._settle(record, ContentRecord(volume_id=volume_id))

    @contextmanager
    def _nothing_kept_if_full(self, record: VolumeRecord) -> Iterator[None]:
        """Whoever is told that the pool is full may never come again, or has the volume made in another pool."""
        try:
            yield
        except errors.Exhausted:
            self._discard(record)
            raise

    def _settle(self, record: VolumeRecord, content: ContentRecord) -> VolumeRecord:
        """Record what the image holds, then that the volume is ready: from there on the node part writes the former.

        A retry replaces the content record of the first attempt.
        """
        volume_id = volumes.VolumeId(record.volume_id)
        # a new image has none, and a copy may have those of its source
        is_limited = record.limits != Limits() or record.content_source is not None
        if self.limits is not None and is_limited:
            self.limits.set_limits(volume_id, record.io_limits)
        present = self.content_records.find(volume_id)
        if present is not None:
            content = content.but(revision=present.revision)
        self.content_records.save(content.note_stored(present.stored if present else None))
        return self.volume_records.save(record.but(phase="ready"))

    async def _finish_create(self, record: VolumeRecord) -> VolumeRecord:
        assert record.content_source is not None
        try:
            content = await self.sources.fill(record, record.content_source)
        except errors.CrustError:
            # Keep nothing, not even the reservation: the CO may not retry.
            await workers.run(self._discard, record)
            raise
        return await workers.run(self._settle_copy, record, content)

    def _settle_copy(self, record: VolumeRecord, content: ContentRecord) -> VolumeRecord:
        with self._nothing_kept_if_full(record):
            return self._settle(record, content)

    async def delete(self, volume_id: volumes.VolumeId) -> None:
        """Delete the volume; absent is a success.

        Raises `IdOfOtherPool`, `StillAttached`, `capability_check.PublishedToOtherNode`.
        """
        await workers.run(self._delete, volume_id)

    def _delete(self, volume_id: volumes.VolumeId) -> None:
        self.pool.ids.check(volume_id)
        record = self.volume_records.find(volume_id)
        if record is not None:
            self.remove(record)

    def remove(self, record: VolumeRecord) -> None:
        """Delete a record's volume, unless it was written since: `RecordChanged`. Raises as `delete`; blocks."""
        volume_id = volumes.VolumeId(record.volume_id)
        attachment = self.node.attached(volume_id)
        if attachment is not None:
            where = ", ".join(self.node.staging_paths(volume_id)) or "no staging path"
            raise StillAttached(volume_id, f"{attachment.shown}, staged at {where}")
        capability_check.check_not_published(record)
        self.node.forget_staged(volume_id)  # it is not attached, so that entry is stale
        self.provisioning.check_unused(volume_id)
        self._discard(record)

    def _discard(self, record: VolumeRecord) -> None:
        """Delete the volume, unless its record was written since: `RecordChanged`. A volume in use stays as it is."""
        volume_id = volumes.VolumeId(record.volume_id)
        deleting = self._note_delete(record)
        try:
            self.provisioning.delete(volume_id)
        except (StillAttached, ForeignImage):  # since it was looked at, or by somebody else
            self.volume_records.save(deleting.but(phase=record.phase))
            raise
        self.content_records.remove(volume_id)
        self.volume_records.remove(volume_id, previous=deleting.stored)

    def _note_delete(self, record: VolumeRecord) -> VolumeRecord:
        """The record that stands: on a full disk, where the delete matters most, it may be the old one."""
        try:
            return self.volume_records.save(record.but(phase="deleting"))
        except errors.Exhausted:
            return self.volume_records.find(record.volume_id) or record


def describe(record: VolumeRecord) -> Volume:
    """A volume as a CO sees it, from its record."""
    context = class_parameters.Parameters("", record.parameters).volume_context
    made_of = record.content_source
    source = content_source.Wanted(made_of.kind, made_of.id) if made_of else None
    return Volume(volumes.VolumeId(record.volume_id), record.capacity_bytes, context, source)


def _check_same(present: VolumeRecord, wanted: VolumeRecord, size: volumes.CapacityRange) -> None:
    if present.name != wanted.name:
        raise VolumeExistsDifferently(wanted.name, "the name, with the same id")
    if not capacity.satisfies(present.capacity_bytes, size):
        raise VolumeExistsDifferently(wanted.name, "capacity_range")
    if present.parameters != wanted.parameters:
        raise VolumeExistsDifferently(wanted.name, "parameters")
    if present.content_source != wanted.content_source:
        raise VolumeExistsDifferently(wanted.name, "volume_content_source")
    if present.usages != wanted.usages:
        raise VolumeExistsDifferently(wanted.name, "volume_capabilities")
    if present.limits != wanted.limits:
        raise VolumeExistsDifferently(wanted.name, "mutable_parameters")
