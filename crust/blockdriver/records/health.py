"""Problems of volumes, of snapshots and of the pool. The driver reports them, and deletes and hides none.

A volume is listed while it has a record or an image: without an image its data is lost, without a record its owner is
unknown. The check costs one stat(2) per volume and waits for no other call. What the pool lacks is known from the
last look at its space.

Problems of snapshots belong to the pool's health: CSI has no field for them at a snapshot. A snapshot without an
image cannot be restored, and its record does not show that. An image without a record takes capacity, and its owner
is unknown. The driver reports and keeps both, as with volumes.
"""

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from crust.blockdriver.engines.pool_access import set_of
from crust.blockdriver.engines.protocol import ImageMissing, ImageReplaced
from crust.blockdriver.records import models
from crust.blockdriver.records.models import RecordMissing, VolumeRecord
from crust.blockdriver.records.records import UNREADABLE
from crust.blockdriver.records.stores import Stores
from crust.core import errors, volumes
from crust.host.answers import NotSeen

_SHOWN = 100
"""The most findings of this kind in one answer."""


class Kind(enum.Enum):
    """VolumeHealthErrorType of CSI 1.13."""

    DEGRADED = 1
    INACCESSIBLE = 2
    DATA_LOSS = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem. `reason` is for programs, `message` for people."""

    kind: Kind
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Health:
    volume_id: volumes.VolumeId
    findings: tuple[Finding, ...] = ()

    @property
    def condition(self) -> volumes.VolumeCondition:
        """The same in the form of CSI 1.12."""
        text = "; ".join(finding.message for finding in self.findings)
        return volumes.VolumeCondition(bool(self.findings), text or "nothing is wrong")


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """Checks volumes and the pool. Every method may block."""

    stores: Stores

    def examine(self, volume_id: volumes.VolumeId) -> Health:
        """A volume's health; raises `models.VolumeNotFound` without a record and an image."""
        try:
            record = self.stores.volume_records.find(volume_id)
        except UNREADABLE as err:
            text = f"{err}; {self._kept_image(volume_id)}"
            return Health(volume_id, (Finding(Kind.INACCESSIBLE, "RecordUnreadable", text),))
        if record is not None:
            return self.of(record)
        is_id = self.stores.pool.ids.is_volume_id(volume_id)
        if not is_id or volume_id not in self.stores.provisioning.image_ids():
            raise models.VolumeNotFound(volume_id)
        record = self.stores.volume_records.find(volume_id)
        if record is not None:  # it was made since
            return self.of(record)
        text = f"the image of {volume_id} has no record; {self._kept_image(volume_id)}"
        return Health(volume_id, (Finding(Kind.INACCESSIBLE, "RecordMissing", text),))

    def of(self, record: VolumeRecord) -> Health:
        volume_id, findings = record.volume_id, list[Finding]()
        try:
            problem = self.stores.provisioning.image_problem(volume_id, record.capacity_bytes)
            if problem:
                findings.append(Finding(Kind.DATA_LOSS, "ImageDamaged", problem))
        except ImageMissing as err:
            findings.append(Finding(Kind.DATA_LOSS, "ImageMissing", str(err)))
        except ImageReplaced as err:
            findings.append(Finding(Kind.DATA_LOSS, "ImageReplaced", str(err)))
        except (*UNREADABLE, NotSeen) as err:
            # One bad sector must not hide the other volumes from a list.
            findings.append(Finding(Kind.INACCESSIBLE, "ImageUnreadable", str(err)))
        try:
            refused = self.stores.content_records.load(volume_id).growth_refused
            if refused:
                findings.append(Finding(Kind.DEGRADED, "FilesystemNotGrown", refused))
        except RecordMissing as err:
            findings.append(Finding(Kind.INACCESSIBLE, "ContentRecordMissing", str(err)))
        except UNREADABLE as err:
            findings.append(Finding(Kind.INACCESSIBLE, "RecordUnreadable", str(err)))
        # of every thin volume: the driver does not ask which of them still needs blocks
        if not record.thick and (missing_bytes := self.stores.capacity.missing_bytes):
            text = (
                f"the pool lacks {missing_bytes} bytes of what its thin volumes were promised: writes to the volume "
                "may fail; remove other files from the pool's disk, or enlarge it"
            )
            findings.append(Finding(Kind.DEGRADED, "CapacityMissing", text))
        return Health(volume_id, tuple(findings))

    def _kept_image(self, volume_id: volumes.VolumeId) -> str:
        try:
            size_bytes = self.stores.provisioning.image_bytes(volume_id)
        except NotSeen as err:
            return f"the image is kept, and no volume can be created until its size is seen: {err}"
        return f"the image is kept, and the {size_bytes} bytes of its size stay reserved"

    def ids(self) -> tuple[volumes.VolumeId, ...]:
        """The ids of all volumes with a record or an image, sorted."""
        images = {
            image_id
            for image_id in self.stores.provisioning.image_ids()
            if self.stores.pool.ids.is_volume_id(image_id)
        }
        return tuple(sorted(images.union(self.stores.volume_records.index.page())))

    def pool(self) -> tuple[Finding, ...]:
        """The pool's problems; it is `INACCESSIBLE`, or volumes can still be used."""
        try:
            self.stores.pool.check_in_place()  # a held folder stays readable after it was moved
            self.stores.provisioning.check_usable()
            free_bytes = self.stores.capacity.available_bytes()
            findings = list(itertools.islice(self._of_snapshots(), _SHOWN))
        except errors.CrustError as err:
            return (Finding(Kind.INACCESSIBLE, "PoolNotUsable", str(err)),)
        if free_bytes == 0:
            text = "the pool has no free capacity: no volume can be created or expanded"
            findings.append(Finding(Kind.DEGRADED, "PoolFull", text))
        return tuple(findings)

    def _of_snapshots(self) -> Iterator[Finding]:
        """A finding for each problem. Raises the errors of `Provisioning.snapshot_ids`."""
        sets = self.stores.snapshot_sets
        for error in sets.unreadable():
            yield Finding(Kind.DEGRADED, "SnapshotRecordUnreadable", str(error))
        # before the images: a set that is taken meanwhile is not lost
        summaries = {set_id: sets.index.get(set_id) for set_id in sets.index.page()}
        images = self.stores.provisioning.snapshot_ids()
        for set_id, summary in summaries.items():
            for snapshot_id, _ in summary.snapshots if summary else ():
                if snapshot_id not in images and sets.index.has(set_id):
                    text = f"the image of {snapshot_id} is gone, and the driver did not remove it"
                    yield Finding(Kind.DEGRADED, "SnapshotImageMissing", text)
        unknown = self._unrecorded(images)
        if unknown:  # look again: a set gets its record after its images
            unknown = self._unrecorded(self.stores.provisioning.snapshot_ids() & unknown)
        for snapshot_id in sorted(unknown):
            text = f"the image of {snapshot_id} has no record; it is kept"
            yield Finding(Kind.DEGRADED, "SnapshotRecordMissing", text)

    def _unrecorded(self, images: frozenset[str]) -> frozenset[str]:
        sets = self.stores.snapshot_sets
        sets_of = ((image, set_of(image)) for image in images)
        return frozenset(
            image for image, set_id in sets_of if sets.is_id(set_id) and not sets.index.has(set_id)
        )
