"""Problems of snapshots, reported as the pool's health: CSI has no field for them at a snapshot.

A snapshot whose image does not exist cannot be restored, and its record does not show that. An image without a record
takes capacity, and its owner is unknown. Both are reported and kept, as with volumes (`records.health`).
"""

from collections.abc import Iterator

from crust.blockdriver.engines.protocol import Provisioning
from crust.blockdriver.records.health import PoolFinding
from crust.blockdriver.records.models import GroupRecord, SnapshotRecord
from crust.blockdriver.records.records import Records


def snapshot_findings(
    snapshot_records: Records[SnapshotRecord],
    groups: Records[GroupRecord],
    provisioning: Provisioning,
) -> Iterator[PoolFinding]:
    """A finding for each. Blocks; raises what `Provisioning.snapshot_ids` does."""
    for error in (*snapshot_records.unreadable(), *groups.unreadable()):
        yield _finding("SnapshotRecordUnreadable", str(error))
    index = snapshot_records.index
    # before the images: a snapshot that is taken meanwhile is not lost
    ready = [each for each in index.page() if index.is_ready(each)]
    images = provisioning.snapshot_ids()
    for snapshot_id in ready:
        if snapshot_id not in images and index.is_ready(snapshot_id):
            text = f"the image of {snapshot_id} does not exist; the driver did not remove it"
            yield _finding("SnapshotImageMissing", text)
    for unknown_id in sorted(_without_record(snapshot_records, images, provisioning)):
        text = f"the image of {unknown_id} has no record; it is kept"
        yield _finding("SnapshotRecordMissing", text)


def _without_record(
    snapshot_records: Records[SnapshotRecord],
    images: frozenset[str],
    provisioning: Provisioning,
) -> frozenset[str]:
    """Look again for missing records: a record is written before its image, and removed after it."""
    found = {
        each
        for each in images
        if snapshot_records.is_id(each) and not snapshot_records.index.has(each)
    }
    return provisioning.snapshot_ids() & found if found else frozenset()


def _finding(reason: str, text: str) -> PoolFinding:
    return PoolFinding(reachable=True, reason=reason, message=text)
