"""CreateVolume, DeleteVolume.

A volume exists when its record exists. The engine makes the image aside and commits it with both records in one step,
and removes all in one step. So a crash leaves a volume or none: a repeated create finds the whole volume and compares
it, or begins from nothing. Then other arguments are valid, because the first call had no answer. Until the commit the
size is reserved only in memory.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from crust.blockdriver.controller import class_parameters, topology
from crust.blockdriver.engines.pool_access import RecordKind
from crust.blockdriver.engines.protocol import NewVolume, StillAttached
from crust.blockdriver.records import capability_check, capacity
from crust.blockdriver.records.models import ContentRecord, Limits, VolumeRecord
from crust.blockdriver.records.stores import Stores
from crust.blockdriver.snapshots import content_source
from crust.blockdriver.snapshots.content_source import ContentSources
from crust.core import deferral_keys, errors, operations, volumes
from crust.host.process import workers

_log = logging.getLogger(__name__)


class VolumeExistsDifferently(errors.Conflict):
    def __init__(self, name: str, differences: str) -> None:
        super().__init__(
            f"the volume {name!r} exists already", why=f"its request differs in {differences}"
        )


@dataclass(frozen=True, slots=True)
class Create:
    """A decoded CreateVolumeRequest; `parameters` as they were sent, `limits` from mutable_parameters."""

    name: str
    size_range: volumes.CapacityRange
    capabilities: tuple[volumes.VolumeCapability, ...]
    parameters: tuple[tuple[str, str], ...] = ()
    is_accessible: bool = True
    """Whether this node meets the accessibility_requirements."""
    source: content_source.SourceRequest | None = None
    limits: class_parameters.Changes = ()


@dataclass(frozen=True, slots=True)
class Provisioner:
    """Creates and deletes volumes. The caller makes one call per volume at a time."""

    stores: Stores
    sources: ContentSources
    thick: bool
    """The kind of a volume whose class names none; its record keeps it."""

    async def create(self, request: Create) -> VolumeRecord:
        """Create the volume; an equal volume is a success. Returns its record.

        Raises `capability_check.CapabilityNotSupported`, `UnknownParameter`,
        InvalidParameter, ThickNotPossible, VolumeSizeNotPossible, `VolumeExistsDifferently`,
        `OrphanImage`, `topology.TopologyNotAccessible`, `OutOfCapacity`, the errors of `content_source`;
        `ImageMissing`, `ForeignImage` for an existing volume whose image is gone: the driver never recreates it under
        the name of its lost data.
        """
        record = await workers.run(self._create, request)
        if record.stored is not None:
            return record
        async with workers.entered(self._making(record)) as making:
            content = await self.sources.fill(making, record)
            if record.thick:  # after the thaw: it copies what a clone shares with its source
                async with workers.long_work(workers.LongWork.COPY):
                    await workers.run(making.allocate, record.capacity_bytes)
            return await workers.run(self._commit, making, record, content)

    def _create(self, request: Create) -> VolumeRecord:
        """The create without the copy from a content source, for which a guest may have to be frozen."""
        supported = self.stores.supported
        parameters = class_parameters.parse(dict(request.parameters), supported.fs_types)
        for capability in request.capabilities:
            if why := supported.obstacle(capability):
                raise capability_check.CapabilityNotSupported(why)
        present = self.stores.volume_records.find(self.stores.pool.ids.volume_id(request.name))
        planned = self._plan(request, parameters, present)
        if present is not None:
            size_bytes, asked = present.capacity_bytes, request.size_range
            limit_bytes = asked.limit_bytes or size_bytes
            is_same = {
                "accessibility_requirements": request.is_accessible,
                "the name, with the same id": present.name == planned.name,
                "capacity_range": asked.required_bytes <= size_bytes <= limit_bytes,
                "parameters": present.parameters == planned.parameters,
                "volume_content_source": present.content_source == planned.content_source,
                "volume_capabilities": present.usages == planned.usages,
                "mutable_parameters": present.limits == planned.limits,
            }
            if different := next((part for part, same in is_same.items() if not same), ""):
                raise VolumeExistsDifferently(request.name, different)
            self.stores.provisioning.check_image(present.volume_id)
            return present
        if planned.thick and (obstacle := self.stores.provisioning.thick_obstacle()):
            raise errors.InvalidRequest.named(
                "ThickNotPossible",
                "a thick volume is not possible",
                why=obstacle,
                hint=f"use a StorageClass with {class_parameters.PROVISIONING}: thin, or another pool",
            )
        if planned.content_source is not None:
            return planned
        with self._making(planned) as making:
            making.create(planned.capacity_bytes)
            if planned.thick:
                making.allocate(planned.capacity_bytes)
            format_in = deferral_keys.format_in(planned.parameters)
            content = ContentRecord(volume_id=planned.volume_id, format_in=format_in)
            return self._commit(making, planned, content)

    def _plan(
        self, request: Create, parameters: class_parameters.Parameters, present: VolumeRecord | None
    ) -> VolumeRecord:
        source, requested = None, request.source
        if requested is not None and present is None:
            source = self.sources.find(requested)
        elif requested is not None and present is not None:
            # in its record: it may have been deleted since
            source = present.content_source
            if source is None or (source.kind, source.id) != (requested.kind, requested.id):
                raise VolumeExistsDifferently(request.name, "volume_content_source")
        if present is None and not request.is_accessible:
            raise topology.TopologyNotAccessible(self.stores.segment)
        fs_type = parameters.fs_type or (source.fs_type if source else "")
        usages = capability_check.usages_of(request.capabilities, fs_type)
        if present is not None:
            size_bytes = present.capacity_bytes
        else:
            size_range = request.size_range
            if source is not None:
                format_in = deferral_keys.format_in(parameters.kept)
                size_range = content_source.sized(size_range, usages, source, format_in)
            maximum = self.stores.provisioning.maximum_bytes
            minimum = capacity.minimum_bytes(usages)
            size_bytes = capacity.choose(size_range, minimum=minimum, maximum=maximum)
        return VolumeRecord(
            volume_id=self.stores.pool.ids.volume_id(request.name),
            name=request.name,
            capacity_bytes=size_bytes,
            parameters=parameters.kept,
            usages=usages,
            thick=self.thick if parameters.thick is None else parameters.thick,
            content_source=source,
            limits=Limits(**dict(parameters.limits + request.limits)),
        )

    @contextmanager
    def _making(self, record: VolumeRecord) -> Iterator[NewVolume]:
        volume_id, source = record.volume_id, record.content_source
        cloned = volumes.VolumeId(source.id) if source and source.kind == "volume" else None
        kind: capacity.Kind = "thick" if record.thick else "thin"
        with (
            self.stores.capacity.reserved(
                volume_id, record.capacity_bytes, kind=kind, cloned=cloned
            ),
            self.stores.provisioning.making(volume_id) as making,
        ):
            yield making

    def _commit(
        self, making: NewVolume, record: VolumeRecord, content: ContentRecord
    ) -> VolumeRecord:
        """Make the volume exist: from then on the node part writes the content record."""
        # a new image has no limits, and a copy may have those of its source
        is_limited = record.limits != Limits() or record.content_source is not None
        set_in_storage = self.stores.engine.set_limits
        if set_in_storage is not None and is_limited:
            set_in_storage(record.volume_id, record.limits.value)
        records = {RecordKind.CONTENT: content.encode()}
        return self.stores.volume_records.make(
            record, lambda data: making.commit({**records, RecordKind.VOLUMES: data})
        )

    def delete(self, volume_id: volumes.VolumeId) -> None:
        """Delete the volume; an absent volume is a success.

        Raises `IdOfOtherPool`, `StillAttached`, `capability_check.PublishedToOtherNode`. Blocks.
        """
        self.stores.pool.ids.check_own_pool(volume_id)
        if not self.stores.pool.ids.is_volume_id(volume_id):
            return
        record = self.stores.volume_records.find(volume_id)
        if record is not None:
            attachment = self.stores.access.attached(volume_id)
            if attachment is not None:
                paths = self.stores.node_state.staging_paths(volume_id)
                where = ", ".join(paths) or "no staging path"
                raise StillAttached(volume_id, f"{attachment.shown}, staged at {where}")
            capability_check.check_not_published(record)
            # it is not attached, so that entry is stale
            self.stores.node_state.forget_staged(volume_id)
        with self.stores.volume_records.changing(volume_id, None):
            self.stores.provisioning.remove(volume_id)

    async def settle(self) -> None:
        """Remove the rest of volumes and sets that crashes and failed calls left half made or half removed.

        It skips a volume that a call works on. The next call tries a failed removal again. An image without a record,
        or a record without an image, is kept, and reported as health.
        """
        for volume_or_set_id in await workers.run(self.stores.provisioning.unsettled):
            try:
                settle = partial(workers.run, self._settle, volume_or_set_id)
                operation = "removal of an unfinished volume or set"
                await self.stores.running.run(volume_or_set_id, operation, None, settle)
            except operations.OperationInProgress:
                continue
            except errors.CrustError as err:
                extra = {"id": volume_or_set_id, "error": err}
                _log.warning("an unfinished volume or set stays", extra=extra)

    def _settle(self, volume_or_set_id: volumes.VolumeId) -> None:
        try:
            self.stores.provisioning.settle(volume_or_set_id)
        finally:
            if self.stores.volume_records.is_id(volume_or_set_id):  # a removal may have been undone
                self.stores.volume_records.look_again(volume_or_set_id)

    def available(
        self,
        capabilities: tuple[volumes.VolumeCapability, ...],
        parameters_sent: tuple[tuple[str, str], ...],
        place: topology.Segments,
    ) -> tuple[int, int, int]:
        """The bytes for such volumes, by the numbers that decide about new volumes: available, the largest and the
        smallest size. All are 0 if such a volume cannot be made. `place` is empty for any topology. Blocks. Raises
        `UnknownParameter`, `InvalidParameter`.
        """
        supported = self.stores.supported
        parameters = class_parameters.parse(dict(parameters_sent), supported.fs_types)
        is_here = not place or topology.is_here(place, self.stores.segment)
        if not is_here or any(map(supported.obstacle, capabilities)):
            return 0, 0, 0
        thick = self.thick if parameters.thick is None else parameters.thick
        if thick and self.stores.provisioning.thick_obstacle():
            return 0, 0, 0
        usages = capability_check.usages_of(capabilities, parameters.fs_type)
        available = self.stores.capacity.available_bytes(thick=thick)
        maximum = min(available, self.stores.provisioning.maximum_bytes)
        return available, maximum, capacity.minimum_bytes(usages)
