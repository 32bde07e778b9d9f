"""NodeGetVolumeStats: usage of a volume at its mount, and its health.

statvfs(2) of a hung filesystem never returns, and a kubelet calls every minute: so at most one thread measures a
path, and every caller gets an answer in time. A raw volume has only a size. A guest has a deferred volume mounted,
and the shim asks it.
"""

from dataclasses import dataclass, replace

from crust.blockdriver.host import device_mounts, usage
from crust.blockdriver.node.node_expand import NotPublishedAtPath
from crust.blockdriver.records import health, models
from crust.blockdriver.records.stores import Stores
from crust.core import errors, volumes
from crust.host.mounts import mountinfo


@dataclass(frozen=True, slots=True)
class StatsQuery:
    volume_id: volumes.VolumeId
    path: volumes.TargetPath
    deferred: bool


@dataclass(frozen=True, slots=True)
class _PublishedVolume:
    record: models.VolumeRecord
    size_bytes: int
    mount: mountinfo.Mount
    is_raw: bool


@dataclass(frozen=True, slots=True)
class NodeStats:
    """Returns statistics, in CSI 1.12 (`tells_condition`) with the volume's condition."""

    stores: Stores
    health_check: health.HealthCheck
    tells_condition: bool
    timeout_s: float = 5.0

    async def measure(self, query: StatsQuery) -> volumes.VolumeStats:
        """Raises `NotPublishedAtPath`, `VolumeMountedInGuest`, `operations.SystemCallTimedOut`."""
        return await self.stores.running.look(
            query,
            lambda: self._measure(query),
            timeout_s=self.timeout_s,
            shown=f"{query.path} of {query.volume_id}",
        )

    async def examine(
        self, volume_id: volumes.VolumeId, path: volumes.TargetPath | None
    ) -> health.Health:
        """The health of the volume, at `path` if it is given.

        Raises `models.VolumeNotFound`, `NotPublishedAtPath`, `operations.SystemCallTimedOut`.
        """
        return await self.stores.running.look(
            ("health", volume_id, path),
            lambda: self._examine(volume_id, path),
            timeout_s=self.timeout_s,
            shown=f"{path} of {volume_id}" if path else volume_id,
        )

    def _examine(
        self, volume_id: volumes.VolumeId, path: volumes.TargetPath | None
    ) -> health.Health:
        volume_health = self.health_check.examine(volume_id)
        entry = self.stores.node_state.published(path) if path else None
        kinds = {finding.kind for finding in volume_health.findings}
        has_problem = bool(kinds - {health.Kind.DEGRADED})
        if path is None or has_problem or (entry is not None and entry.deferred):
            return volume_health
        problem = _problem(self._find(StatsQuery(volume_id, path, deferred=False)))
        if not problem:
            return volume_health
        finding = health.Finding(health.Kind.INACCESSIBLE, "DeviceFailed", problem)
        return health.Health(volume_id, (finding, *volume_health.findings))

    def _measure(self, query: StatsQuery) -> volumes.VolumeStats:
        published = self._find(query)
        if published.is_raw:
            total = volumes.VolumeUsage(volumes.UsageUnit.BYTES, published.size_bytes, 0, 0)
            stats = volumes.VolumeStats((total,))
        else:
            stats = usage.measure(published.mount.target)
        if not self.tells_condition:
            return stats
        if problem := _problem(published):
            return replace(stats, condition=volumes.VolumeCondition(abnormal=True, message=problem))
        return replace(stats, condition=self.health_check.of(published.record).condition)

    def _find(self, query: StatsQuery) -> _PublishedVolume:
        record = self.stores.volume_records.load(query.volume_id)
        entry = self.stores.node_state.published(query.path)
        if query.deferred or (entry is not None and entry.deferred):
            raise errors.NotReady.named(
                "VolumeMountedInGuest",
                f"the driver has no statistics of {query.volume_id} at {query.path.text}",
                why="it was published with deferral: a guest's kernel has it mounted",
            )
        attachment = self.stores.access.host_device(query.volume_id)
        mount = mountinfo.at(query.path.text)
        device = attachment.device if attachment else None
        shown = device is not None and mount is not None and device_mounts.shows(mount, device)
        if attachment is None or device is None or mount is None or not shown:
            raise NotPublishedAtPath(query.volume_id, query.path.text)
        is_raw = device_mounts.is_node(mount, device)
        return _PublishedVolume(record, attachment.size_bytes, mount, is_raw)


def _problem(published: _PublishedVolume) -> str:
    return "" if published.is_raw else usage.problem(published.mount)
