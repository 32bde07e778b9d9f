"""ListVolumes, ControllerGetVolume and the health calls: pages of a list that may change between calls.

A page's token is the last id on it, and ids are listed in order. So a volume that exists from the first page to the
last is listed exactly once, whatever is created or deleted meanwhile, the token's own volume included, and the driver
keeps nothing between two calls.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from crust import errors, volumes
from crust.blockdriver.controller import create_volume
from crust.blockdriver.controller.controller_publish import ControllerPublish
from crust.blockdriver.records import models
from crust.blockdriver.records.health import Health, HealthCheck
from crust.blockdriver.records.models import VolumeRecord
from crust.blockdriver.records.pool import Pool
from crust.blockdriver.records.records import UNREADABLE, Records
from crust.rpc.messages.limits import InvalidStartingToken, NegativeMaxEntries

PAGE_MAX = 5000
"""The largest page, also without a limit in the request: the answer must fit a gRPC message."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """A volume, the nodes that have it, and its health."""

    volume: create_volume.Volume
    nodes: tuple[str, ...]
    health: Health


class VolumeLister:
    """Lists volumes. Every method may block."""

    def __init__(
        self,
        pool: Pool,
        known: Records[VolumeRecord],
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
        if record is None or record.phase != "ready":
            raise models.VolumeNotFound(volume_id)
        nodes = self._publisher.published_nodes(record)
        return Listed(create_volume.describe(record), nodes, self._health_check.of(record))

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
