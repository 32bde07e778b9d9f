"""ListVolumes, ControllerGetVolume and the health calls: pages of a list that may change between calls.

A page's token is the last id on it, and ids are listed in order. So a volume that exists from the first page to the
last is listed exactly once, even if other volumes are created or deleted meanwhile, the token's own included, and the
driver keeps nothing between two calls.

ValidateVolumeCapabilities: whether a volume has the properties in the CO's request.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from crust.blockdriver.controller import class_parameters
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.health import Health, HealthCheck
from crust.blockdriver.records.models import VolumeRecord
from crust.blockdriver.records.records import UNREADABLE
from crust.blockdriver.records.stores import Stores
from crust.core import errors, volumes
from crust.rpc.messages import csi

PAGE_MAX = 5000
"""The largest page, also without a limit in the request: the answer must fit a gRPC message."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """A volume, the nodes that have it, and its health; `record` is None if it cannot be read."""

    volume_id: volumes.VolumeId
    record: VolumeRecord | None
    nodes: tuple[str, ...]
    health: Health


@dataclass(frozen=True, slots=True)
class VolumeLister:
    """Lists volumes, and compares a volume with a CO's request. Every method may block."""

    stores: Stores
    health_check: HealthCheck

    def get(self, volume_id: volumes.VolumeId) -> Listed:
        """One volume; raises `models.VolumeNotFound`. A node has it after a ControllerPublishVolume, or a stage."""
        try:
            record = self.stores.volume_records.load(volume_id)
        except UNREADABLE:
            return Listed(volume_id, None, (), self.health_check.examine(volume_id))
        nodes = {node.node_id for node in record.nodes}
        if self.stores.node_state.staging_paths(volume_id):
            nodes.add(self.stores.node_id)
        return Listed(volume_id, record, tuple(sorted(nodes)), self.health_check.of(record))

    def page(self, count: int, token: str) -> tuple[tuple[Listed, ...], str]:
        """The volumes after `token`, and the next token. Raises as `csi.check_page`."""
        csi.check_page(count, token, self.stores.pool.ids.is_volume_id)
        ids = iter(self.stores.volume_records.index.page(token))
        return cut(self._existing(ids, self.get), count, lambda listed: listed.volume_id)

    def health_page(self, count: int, token: str) -> tuple[tuple[Health, ...], str]:
        """The health of volumes after `token`, and the next token. Raises as `csi.check_page`."""
        csi.check_page(count, token, self.stores.pool.ids.is_volume_id)
        ids = (volume_id for volume_id in self.health_check.ids() if volume_id > token)
        healths = self._existing(ids, self.health_check.examine)
        return cut(healths, count, lambda health: health.volume_id)

    def _existing(
        self, ids: Iterator[volumes.VolumeId], look: Callable[[volumes.VolumeId], T]
    ) -> Iterator[T]:
        for volume_id in ids:
            try:
                yield look(volume_id)
            except errors.NotFound:
                continue  # incomplete, or deleted since the ids were read

    def why_not(
        self,
        volume_id: volumes.VolumeId,
        capabilities: tuple[volumes.VolumeCapability, ...],
        context: Mapping[str, str],
        sent_parameters: Mapping[str, str],
        sent_mutable: Mapping[str, str],
    ) -> str:
        """The reason why the volume does not match the request; empty if it does.

        Raises `VolumeNotFound`, `ImageMissing`, `ForeignImage`.
        """
        record = self.stores.volume_records.load(volume_id)
        self.stores.provisioning.check_image(volume_id)
        for capability in capabilities:
            access = capability.access
            if why := self.stores.supported.obstacle(capability):
                return why
            if isinstance(access, volumes.BlockAccess) or not access.fs_type:
                continue
            made = self.stores.content_records.load(volume_id).fs_type
            present = capability_check.wanted_fs_type(volumes.MountAccess(), record, made)
            if access.fs_type != present:
                return f"the volume's filesystem is {present}"
        recorded = class_parameters.volume_context(record.parameters)
        others = class_parameters.IN_CONTEXTS
        given = {key: value for key, value in context.items() if not key.startswith(others)}
        if context and given != recorded:
            return "the volume has another volume_context"
        try:
            sent = class_parameters.parse(sent_parameters, self.stores.supported.fs_types)
            limits = class_parameters.parse_mutable(sent_mutable)
        except errors.InvalidRequest as err:
            return str(err)
        if replace(record.limits.value, **dict(limits)) != record.limits.value:
            return "the volume has other mutable_parameters now"
        if sent_parameters and sent.kept != record.parameters:
            return "the volume was created with other parameters"
        return ""


def cut(items: Iterator[T], count: int, id_of: Callable[[T], str]) -> tuple[tuple[T, ...], str]:
    """The first `count` of `found`, and the token for the rest; reads one more than it returns."""
    limit = min(count or PAGE_MAX, PAGE_MAX)
    page: list[T] = []
    for item in items:
        if len(page) == limit:
            return tuple(page), id_of(page[-1])
        page.append(item)
    return tuple(page), ""
