"""Problems of snapshots, reported as the pool's health: CSI has no field for them at a snapshot.

A snapshot whose image does not exist cannot be restored, and its record does not show that. An image without a record
takes capacity, and its owner is unknown. Both are reported and kept, as with volumes (`records.health`).
"""

from collections.abc import Iterator

from crust.blockdriver.engines.protocol import Provisioning
from crust.blockdriver.records.health import PoolFinding
from crust.blockdriver.records.snapshot_record import GroupRecord, SnapshotRecord, SnapshotRecords


def snapshot_findings(
    snapshot_records: SnapshotRecords[SnapshotRecord],
    groups: SnapshotRecords[GroupRecord],
    provisioning: Provisioning,
) -> Iterator[PoolFinding]:
    """A finding for each. Blocks; raises what `Provisioning.snapshot_ids` does."""
    for text in (*snapshot_records.unreadable(), *groups.unreadable()):
        yield _finding("SnapshotRecordUnreadable", text)
    ready = (
        snapshot_records.ready()
    )  # before the images: a snapshot that is taken meanwhile is not lost
    images = provisioning.snapshot_ids()
    for record in ready:
        if record.snapshot_id not in images and snapshot_records.is_ready(record.snapshot_id):
            text = f"the image of {record.snapshot_id} does not exist; the driver did not remove it"
            yield _finding("SnapshotImageMissing", text)
    for snapshot_id in sorted(_without_record(snapshot_records, images, provisioning)):
        text = f"the image of {snapshot_id} has no record; it is kept"
        yield _finding("SnapshotRecordMissing", text)


def _without_record(
    snapshot_records: SnapshotRecords[SnapshotRecord],
    images: frozenset[str],
    provisioning: Provisioning,
) -> frozenset[str]:
    """Look again for missing records: a record is written before its image, and removed after it."""
    found = {
        each for each in images if snapshot_records.is_id(each) and not snapshot_records.has(each)
    }
    return provisioning.snapshot_ids() & found if found else frozenset()


def _finding(reason: str, text: str) -> PoolFinding:
    return PoolFinding(reachable=True, reason=reason, message=text)
