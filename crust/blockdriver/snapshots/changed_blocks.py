"""The allocated blocks of a snapshot and the changed blocks of two: rules for these requests.

A part that is not listed is zeros (allocated) or equal (delta); a listed part may be either. Where the engine cannot
compute the list, it refuses (`NoChangeTracking`).
"""

from collections.abc import Iterator, Sequence

from crust import errors
from crust.blockdriver.engines.protocol import Region
from crust.blockdriver.records.models import SnapshotRecord


class OffsetPastEnd(errors.OutOfRange):
    """CSI GetMetadataAllocated: a starting_offset outside the snapshot is OUT_OF_RANGE."""

    def __init__(self, offset: int, size_bytes: int) -> None:
        super().__init__(
            "starting_offset is invalid",
            why=f"{offset} is not within the snapshot's {size_bytes} bytes",
        )


class UnrelatedSnapshots(errors.InvalidRequest):
    """Two snapshots of different volumes."""

    def __init__(self, base: str, target: str) -> None:
        super().__init__(
            f"{base} and {target} cannot be compared", why="they are of different volumes"
        )


def check_related(base: SnapshotRecord, target: SnapshotRecord) -> None:
    """Raise `UnrelatedSnapshots` for snapshots of two volumes."""
    if base.source_volume_id != target.source_volume_id:
        raise UnrelatedSnapshots(base.snapshot_id, target.snapshot_id)


def check_offset(offset: int, record: SnapshotRecord) -> None:
    """Raise `OffsetPastEnd` for an offset outside the snapshot."""
    # The end itself is valid: a caller that has read everything continues there.
    if not 0 <= offset <= record.size_bytes:
        raise OffsetPastEnd(offset, record.size_bytes)


def within(found: Sequence[Region], start: int, end: int) -> Iterator[Region]:
    """The parts of `found` from `start` to `end`, in bytes."""
    for region in found:
        first = max(region.offset, start)
        last = min(region.offset + region.length, end)
        if first < last:
            yield Region(first, last - first)
