"""ListVolumes, ControllerGetVolume and the health calls: pages of a list that may change between calls.

A page's token is the last id on it, and ids are listed in order. So a volume that exists from the first page to the
last is listed exactly once, whatever is created or deleted meanwhile, the token's own volume included, and the driver
keeps nothing between two calls.

ValidateVolumeCapabilities: whether a volume has what a CO states of it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from crust.blockdriver.controller import class_parameters, create_volume
from crust.blockdriver.controller.controller_publish import ControllerPublish
from crust.blockdriver.engines.pool_store import PoolHome
from crust.blockdriver.engines.protocol import Provisioning
from crust.blockdriver.records import capability_check, models
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.health import Health, HealthCheck
from crust.blockdriver.records.models import ContentRecord, VolumeRecord
from crust.blockdriver.records.records import UNREADABLE, IndexedRecords, Records
from crust.core import errors, volumes
from crust.rpc.messages.limits import InvalidStartingToken, NegativeMaxEntries

PAGE_MAX = 5000
"""The largest page, also without a limit in the request: the answer must fit a gRPC message."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """A volume, the nodes that have it, and its health. `name` is CreateVolume's, empty if no record has it."""

    volume: create_volume.Volume
    nodes: tuple[str, ...]
    health: Health
    name: str = ""


class VolumeLister:
    """Lists volumes. Every method may block."""

    def __init__(
        self,
        pool: PoolHome,
        known: IndexedRecords[VolumeRecord],
        publisher: ControllerPublish,
        health_check: HealthCheck,
    ) -> None:
        self._pool = pool
        self._volume_records = known
        self._publisher = publisher
        self._health_check = health_check

    def get(self, volume_id: volumes.VolumeId) -> Listed:
        """One volume; raises `models.VolumeNotFound`. Without a readable record its size is 0."""
        try:
            record = self._volume_records.find(volume_id)
        except UNREADABLE:
            health = self._health_check.examine(volume_id)
            return Listed(create_volume.Volume(volume_id, 0), (), health)
        if record is None:
            raise models.VolumeNotFound(volume_id)
        nodes = self._publisher.published_nodes(record)
        health = self._health_check.of(record)
        return Listed(create_volume.describe(record), nodes, health, record.name)

    def page(self, count: int, token: str) -> tuple[tuple[Listed, ...], str]:
        """The volumes after `token`, and the next token. Raises `InvalidStartingToken`, `NegativeMaxEntries`."""
        self._check(count, token)
        ids = (each for each in self._volume_records.index.page(token))
        return cut(self._existing(ids, self.get), count, lambda each: each.volume.volume_id)

    def health_page(self, count: int, token: str) -> tuple[tuple[Health, ...], str]:
        """The health of volumes after `token`, and the next token. Raises `InvalidStartingToken`,
        `NegativeMaxEntries`.
        """
        self._check(count, token)
        ids = (each for each in self._health_check.ids() if each > token)
        return cut(
            self._existing(ids, self._health_check.examine), count, lambda each: each.volume_id
        )

    def _check(self, count: int, token: str) -> None:
        if count < 0:
            raise NegativeMaxEntries(count)
        if token and not self._pool.ids.is_volume_id(token):
            raise InvalidStartingToken(token)

    def _existing(
        self, ids: Iterator[volumes.VolumeId], look: Callable[[volumes.VolumeId], T]
    ) -> Iterator[T]:
        for volume_id in ids:
            try:
                yield look(volume_id)
            except errors.NotFound:
                continue  # incomplete, or deleted since the ids were read


def cut(found: Iterator[T], count: int, id_of: Callable[[T], str]) -> tuple[tuple[T, ...], str]:
    """The first `count` of `found`, and the token for the rest; reads one more than it returns."""
    limit = min(count or PAGE_MAX, PAGE_MAX)
    page: list[T] = []
    for each in found:
        if len(page) == limit:
            return tuple(page), id_of(page[-1])
        page.append(each)
    return tuple(page), ""


@dataclass(frozen=True, slots=True)
class Validation:
    """Compares a volume with what a CO states."""

    volume_records: IndexedRecords[VolumeRecord]
    content_records: Records[ContentRecord]
    supported: SupportedCapabilities
    provisioning: Provisioning

    def why_not(
        self,
        volume_id: volumes.VolumeId,
        capabilities: tuple[volumes.VolumeCapability, ...],
        context: Mapping[str, str],
        sent_parameters: Mapping[str, str],
        sent_mutable: Mapping[str, str],
    ) -> str:
        """The reason why the volume does not match the request; empty if it does. Blocks.

        Raises `VolumeNotFound`, `ImageMissing`, `ForeignImage`.
        """
        record = self.volume_records.load(volume_id)
        self.provisioning.check_image(volume_id)
        for capability in capabilities:
            if why := self.supported.obstacle(capability) or self._mismatch(record, capability):
                return why
        recorded = class_parameters.Parameters("", record.parameters)
        if context and class_parameters.without_sidecars(context) != recorded.volume_context:
            return "the volume has another volume_context"
        try:
            sent = class_parameters.parse(sent_parameters, self.supported.fs_types)
            limits = class_parameters.parse_mutable(sent_mutable)
        except errors.InvalidRequest as err:
            return str(err)
        if class_parameters.changed(record.limits.value, limits) != record.limits.value:
            return "the volume has other mutable_parameters now"
        if sent_parameters and sent.kept != record.parameters:
            return "the volume was created with other parameters"
        return ""

    def _mismatch(self, record: VolumeRecord, capability: volumes.VolumeCapability) -> str:
        access = capability.access
        if isinstance(access, volumes.BlockAccess) or not access.fs_type:
            return ""
        known = self.content_records.load(volumes.VolumeId(record.volume_id))
        present = capability_check.wanted_fs_type(volumes.MountAccess(), record, known.fs_type)
        return "" if access.fs_type == present else f"the volume's filesystem is {present}"
