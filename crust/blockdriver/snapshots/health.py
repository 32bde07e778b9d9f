"""What is wrong with snapshots, told as the pool's health: CSI has no place for it at a snapshot itself.

A snapshot whose image is gone cannot be restored, and its record says nothing of that. An image without a record has
an owner that nobody can name, and takes room. Both are told and kept, as with volumes (`health`).
"""

from collections.abc import Iterator

from crust.blockdriver.engines.protocol import Backend
from crust.blockdriver.records.health import PoolFinding
from crust.blockdriver.records.snapshot_record import GroupRecord, SnapshotRecord, SnapshotRecords


def snapshot_findings(
    snapshot_records: SnapshotRecords[SnapshotRecord],
    groups: SnapshotRecords[GroupRecord],
    backend: Backend,
) -> Iterator[PoolFinding]:
    """A sentence for each. Blocks; raises what `Backend.snapshot_ids` does."""
    for text in (*snapshot_records.unreadable(), *groups.unreadable()):
        yield _finding("SnapshotRecordUnreadable", text)
    ready = (
        snapshot_records.ready()
    )  # before the images, because one that is taken meanwhile is not lost
    images = backend.snapshot_ids()
    for record in ready:
        if record.snapshot_id not in images and snapshot_records.is_ready(record.snapshot_id):
            text = f"the image of {record.snapshot_id} is gone; the driver did not remove it"
            yield _finding("SnapshotImageMissing", text)
    for snapshot_id in sorted(_without_record(snapshot_records, images, backend)):
        text = f"there is an image of {snapshot_id} and no record of whose it is; it is kept"
        yield _finding("SnapshotRecordMissing", text)


def _without_record(
    snapshot_records: SnapshotRecords[SnapshotRecord], images: frozenset[str], backend: Backend
) -> frozenset[str]:
    """A record is there before its image and longer; so one that is missed is looked for once more."""
    found = {
        each for each in images if snapshot_records.is_id(each) and not snapshot_records.has(each)
    }
    return backend.snapshot_ids() & found if found else frozenset()


def _finding(reason: str, text: str) -> PoolFinding:
    return PoolFinding(reachable=True, reason=reason, message=text)
