"""Garbage collection of inline ephemeral volumes that the CO forgot: the pod's directory is gone, no unpublish comes.

Nobody else can find them: they are in no list, and the CO does not know the driver's id. One is deleted when it has
been unused for the grace: no entry of the node state, staged or published, and no device, so no mount either. After a
reboot all are unused until the CO publishes them again, and a publish that fails is tried again. So the grace begins
when the driver first finds the volume unused in this boot, and again with each publish that is tried:

    <run dir>/unused/<volume id>    one line: the boot, and the seconds since boot when it was found unused

Each removal is an operation of its volume, so it never runs beside a publish. Until then health and a metric count
them.
"""

import logging
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from crust import errors, metrics, operations, volumes
from crust.blockdriver.node.live_volumes import LiveVolumes
from crust.blockdriver.node.publish.ephemeral import EphemeralProvisioner
from crust.blockdriver.records.health import PoolFinding
from crust.blockdriver.records.volume_records import VolumeRecords
from crust.host.files import durable
from crust.host.process import boot, workers

GRACE_S = 3600.0

_LIMIT_BYTES = 4096
_log = logging.getLogger(__name__)


def seconds_since_boot() -> float:
    """Suspended time included; no change of the host's clock moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class UnusedSince:
    """Since when volumes are unused. Every method blocks; one call per volume at a time."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._directory = os.path.join(run_dir, "unused")

    def seconds(self, volume_id: volumes.VolumeId) -> float:
        """How long ago the volume was first found unused; 0, and noted, if that is now."""
        now = seconds_since_boot()
        since = self._noted(volume_id)
        if since is not None and since <= now:
            return now - since
        durable.make_directory(self._run_dir, 0o700)
        durable.make_directory(self._directory, 0o700)
        line = f"{boot.boot_id()} {now}\n".encode()
        durable.publish(self._path(volume_id), line, survives_power_cut=False)
        return 0.0

    def forget(self, volume_id: volumes.VolumeId) -> None:
        """The volume is used, or gone; absent is a success."""
        durable.remove(self._path(volume_id), survives_power_cut=False)

    def forget_others(self, unused: Collection[str]) -> None:
        """Forget every other volume."""
        if os.path.isdir(self._directory):
            durable.remove_temporary_files(self._directory)
            for name in os.listdir(self._directory):
                if name not in unused:
                    self.forget(volumes.VolumeId(name))

    def _noted(self, volume_id: volumes.VolumeId) -> float | None:
        """Seconds since boot; None without a line of this boot that can be read."""
        try:
            line = durable.read(self._path(volume_id), limit_bytes=_LIMIT_BYTES).decode()
            boot_id, _, seconds = line.partition(" ")
            return float(seconds) if boot_id == boot.boot_id() else None
        except (errors.NotFound, errors.Corrupt, ValueError):
            return None

    def _path(self, volume_id: volumes.VolumeId) -> str:
        return os.path.join(self._directory, volume_id)


class UnusedVolumes:
    """Finds unused ephemeral volumes, and tells of those that the last look found."""

    def __init__(
        self, driver: str, volume_records: VolumeRecords, live: LiveVolumes, since: UnusedSince
    ) -> None:
        self._driver = driver
        self._volume_records = volume_records
        self._live = live
        self._since = since
        self._found: tuple[volumes.VolumeId, ...] = ()

    def look(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes that are unused now. Blocks."""
        ephemeral = self._volume_records.index.ephemeral()
        self._found = tuple(each for each in ephemeral if self._is_unused(each))
        self._since.forget_others(self._found)
        metrics.unused_ephemeral_volumes.labels(self._driver).set(len(self._found))
        return self._found

    def seconds(self, volume_id: volumes.VolumeId) -> float:
        """How long the volume has been unused; 0 if it is used or gone. Called in an operation of it. Blocks."""
        if volume_id not in self._volume_records.index.ephemeral() or not self._is_unused(
            volume_id
        ):
            return 0.0
        return self._since.seconds(volume_id)

    def forget(self, volume_id: volumes.VolumeId) -> None:
        """The volume is about to be used, or was deleted. Blocks."""
        self._since.forget(volume_id)

    def _is_unused(self, volume_id: volumes.VolumeId) -> bool:
        try:
            return not (
                self._live.staging_paths(volume_id)
                or self._live.node_state.published_of(volume_id)
                or self._live.attached(volume_id)
            )
        except errors.CrustError:
            return (
                False  # not known: its image or its entry is damaged, which is reported elsewhere
            )

    def findings(self) -> Iterator[PoolFinding]:
        """One finding for all of them."""
        if self._found:
            text = (
                f"{len(self._found)} inline ephemeral volumes are neither attached nor published;"
                " they keep their capacity until they are deleted"
            )
            yield PoolFinding(reachable=True, reason="EphemeralVolumesUnused", message=text)


@dataclass(frozen=True, slots=True)
class EphemeralGarbageCollector:
    """Deletes what has been unused for `grace_s`."""

    driver: volumes.DriverName
    unused: UnusedVolumes
    provisioner: EphemeralProvisioner
    running: operations.KeyedOperations
    grace_s: float = GRACE_S

    async def collect(self) -> tuple[volumes.VolumeId, ...]:
        """Delete forgotten volumes; returns those that were deleted. What cannot be deleted is tried again."""
        found = await workers.run(self.unused.look)
        return tuple([each for each in found if await self._remove(each)])

    async def _remove(self, volume_id: volumes.VolumeId) -> bool:
        key = volumes.VolumeKey(self.driver, volume_id)
        what = "removal of a forgotten ephemeral volume"
        try:
            return await self.running.run(key, what, None, lambda: self._delete(volume_id))
        except errors.CrustError as err:
            extra = {"volume_id": volume_id, "error": err}
            _log.warning("a forgotten ephemeral volume stays", extra=extra)
            return False

    async def _delete(self, volume_id: volumes.VolumeId) -> bool:
        unused_s = await workers.run(self.unused.seconds, volume_id)
        if unused_s < self.grace_s:
            return False
        await self.provisioner.delete(volume_id)
        await workers.run(self.unused.forget, volume_id)
        proof = {"staged": False, "published": False, "device": None, "unused_s": round(unused_s)}
        _log.warning(
            "deleted an ephemeral volume that the CO forgot",
            extra={"volume_id": volume_id, **proof},
        )
        return True
