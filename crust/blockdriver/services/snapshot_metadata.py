"""CSI SnapshotMetadata: decode, call, encode.

Each list is read in one thread hop, from snapshots that cannot change, and streamed in several messages.

The allocated blocks of a snapshot and the changed blocks of two: rules for these requests.

A part that is not listed is zeros (allocated) or equal (delta); a listed part may be either. Where the engine cannot
compute the list, it refuses (`NoChangeTracking`).
"""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from crust.blockdriver.engines.protocol import Provisioning, Region
from crust.blockdriver.records.models import Snapshot
from crust.blockdriver.services.deadlines import Reads
from crust.blockdriver.services.snapshot_calls import SnapshotCalls
from crust.blockdriver.snapshots import snapshot_sets
from crust.core import errors
from crust.rpc.call import Call
from crust.rpc.messages import limits
from crust.wire.csi.v1 import csi_pb2

PIECE_MAX = 4096
"""The most blocks in one message, also without a limit in the request."""


class SnapshotMetadata:
    """The SnapshotMetadata service."""

    def __init__(self, calls: SnapshotCalls, provisioning: Provisioning, reads: Reads) -> None:
        self._calls = calls
        self._reads = reads
        self._provisioning = provisioning

    async def GetMetadataAllocated(
        self, request: csi_pb2.GetMetadataAllocatedRequest, call: Call
    ) -> AsyncIterator[csi_pb2.GetMetadataAllocatedResponse]:
        """The blocks that may be other than zeros."""
        snapshot_id = limits.required(request.snapshot_id, "snapshot_id")
        _check_count(request.max_results)
        _, record = await self._calls.found(snapshot_id, call)
        check_offset(request.starting_offset, record)
        image = snapshot_sets.image_of(record)
        found = await self._look((snapshot_id,), lambda: self._provisioning.allocated(image), call)
        for piece in _pieces(found, request.starting_offset, record, request.max_results):
            yield csi_pb2.GetMetadataAllocatedResponse(
                block_metadata_type=csi_pb2.VARIABLE_LENGTH,
                volume_capacity_bytes=record.size_bytes,
                block_metadata=piece,
            )

    async def GetMetadataDelta(
        self, request: csi_pb2.GetMetadataDeltaRequest, call: Call
    ) -> AsyncIterator[csi_pb2.GetMetadataDeltaResponse]:
        """The blocks of the target that may differ from the base."""
        base_id = limits.required(request.base_snapshot_id, "base_snapshot_id")
        target_id = limits.required(request.target_snapshot_id, "target_snapshot_id")
        _check_count(request.max_results)
        _, base = await self._calls.found(base_id, call)
        _, target = await self._calls.found(target_id, call)
        check_related(base, target)
        check_offset(request.starting_offset, target)
        images = [snapshot_sets.image_of(each) for each in (base, target)]
        found = await self._look(
            (base_id, target_id), lambda: self._provisioning.changed(*images), call
        )
        for piece in _pieces(found, request.starting_offset, target, request.max_results):
            yield csi_pb2.GetMetadataDeltaResponse(
                block_metadata_type=csi_pb2.VARIABLE_LENGTH,
                volume_capacity_bytes=target.size_bytes,
                block_metadata=piece,
            )

    async def _look(
        self, snapshot_ids: tuple[str, ...], work: Callable[[], Sequence[Region]], call: Call
    ) -> Sequence[Region]:
        """Lock snapshots against deletion while they are read; any number of readers."""
        calls = self._calls
        with contextlib.ExitStack() as held:
            for each in snapshot_ids:
                held.enter_context(
                    calls.running.shared(calls.key(each), "a read of its block list")
                )
            return await self._reads.read("GetMetadata", snapshot_ids, work, call)


def _check_count(count: int) -> None:
    if count < 0:
        raise errors.InvalidRequest.named(
            "NegativeMaxResults", "max_results is invalid", why=f"{count} is negative"
        )


def _pieces(
    found: Sequence[Region], start: int, record: Snapshot, count: int
) -> Iterator[list[csi_pb2.BlockMetadata]]:
    """Blocks from `start` to the snapshot's end, so many to a message."""
    blocks = within(found, start, record.size_bytes)
    limit = min(count or PIECE_MAX, PIECE_MAX)
    while piece := list(itertools.islice(blocks, limit)):
        yield [
            csi_pb2.BlockMetadata(byte_offset=each.offset, size_bytes=each.length) for each in piece
        ]


def check_related(base: Snapshot, target: Snapshot) -> None:
    """Raise `UnrelatedSnapshots` for snapshots of two volumes."""
    if base.source_volume_id != target.source_volume_id:
        raise errors.InvalidRequest.named(
            "UnrelatedSnapshots",
            f"{base.snapshot_id} and {target.snapshot_id} cannot be compared",
            why="they are of different volumes",
        )


def check_offset(offset: int, record: Snapshot) -> None:
    """Raise `OffsetPastEnd` for an offset outside the snapshot."""
    # The end itself is valid: a caller that has read everything continues there.
    if not 0 <= offset <= record.size_bytes:
        raise errors.OutOfRange.named(
            "OffsetPastEnd",
            "starting_offset is invalid",
            why=f"{offset} is not within the snapshot's {record.size_bytes} bytes",
        )


def within(found: Sequence[Region], start: int, end: int) -> Iterator[Region]:
    """The parts of `found` from `start` to `end`, in bytes."""
    for region in found:
        first = max(region.offset, start)
        last = min(region.offset + region.length, end)
        if first < last:
            yield Region(first, last - first)
