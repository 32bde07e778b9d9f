"""CSI SnapshotMetadata: decode, call, encode.

Each list is read in one thread hop, from snapshots that cannot change, and streamed in several messages.
"""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc.aio

from crust import errors
from crust.blockdriver.engines.protocol import Provisioning, Region
from crust.blockdriver.records.models import SnapshotRecord
from crust.blockdriver.services.deadlines import Reads
from crust.blockdriver.services.snapshot_calls import SnapshotCalls
from crust.blockdriver.snapshots import changed_blocks, take_snapshot
from crust.rpc.messages import limits
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
PIECE_MAX = 4096
"""The most blocks in one message, also without a limit in the request."""


class NegativeMaxResults(errors.InvalidRequest):
    """max_results below zero."""

    def __init__(self, count: int) -> None:
        super().__init__("max_results is invalid", why=f"{count} is negative")


class SnapshotMetadata(csi_pb2_grpc.SnapshotMetadataServicer):
    """The SnapshotMetadata service."""

    def __init__(self, calls: SnapshotCalls, provisioning: Provisioning, reads: Reads) -> None:
        self._calls = calls
        self._reads = reads
        self._provisioning = provisioning

    async def GetMetadataAllocated(
        self, request: csi_pb2.GetMetadataAllocatedRequest, context: Context
    ) -> AsyncIterator[csi_pb2.GetMetadataAllocatedResponse]:
        """The blocks that may be other than zeros."""
        snapshot_id = limits.required(request.snapshot_id, "snapshot_id")
        _check_count(request.max_results)
        record = await self._calls.found(snapshot_id, context)
        changed_blocks.check_offset(request.starting_offset, record)
        image = take_snapshot.image_of(record)
        found = await self._look(
            (snapshot_id,), lambda: self._provisioning.allocated(image), context
        )
        for piece in _pieces(found, request.starting_offset, record, request.max_results):
            yield csi_pb2.GetMetadataAllocatedResponse(
                block_metadata_type=csi_pb2.VARIABLE_LENGTH,
                volume_capacity_bytes=record.size_bytes,
                block_metadata=piece,
            )

    async def GetMetadataDelta(
        self, request: csi_pb2.GetMetadataDeltaRequest, context: Context
    ) -> AsyncIterator[csi_pb2.GetMetadataDeltaResponse]:
        """The blocks of the target that may differ from the base."""
        base_id = limits.required(request.base_snapshot_id, "base_snapshot_id")
        target_id = limits.required(request.target_snapshot_id, "target_snapshot_id")
        _check_count(request.max_results)
        base = await self._calls.found(base_id, context)
        target = await self._calls.found(target_id, context)
        changed_blocks.check_related(base, target)
        changed_blocks.check_offset(request.starting_offset, target)
        images = [take_snapshot.image_of(each) for each in (base, target)]
        found = await self._look(
            (base_id, target_id), lambda: self._provisioning.changed(*images), context
        )
        for piece in _pieces(found, request.starting_offset, target, request.max_results):
            yield csi_pb2.GetMetadataDeltaResponse(
                block_metadata_type=csi_pb2.VARIABLE_LENGTH,
                volume_capacity_bytes=target.size_bytes,
                block_metadata=piece,
            )

    async def _look(
        self, snapshot_ids: tuple[str, ...], work: Callable[[], Sequence[Region]], context: Context
    ) -> Sequence[Region]:
        """Lock snapshots against deletion while they are read; any number of readers."""
        calls = self._calls
        with contextlib.ExitStack() as held:
            for each in snapshot_ids:
                held.enter_context(
                    calls.running.shared(calls.key(each), "a read of its block list")
                )
            return await self._reads.read("GetMetadata", snapshot_ids, work, context)


def _check_count(count: int) -> None:
    if count < 0:
        raise NegativeMaxResults(count)


def _pieces(
    found: Sequence[Region], start: int, record: SnapshotRecord, count: int
) -> Iterator[list[csi_pb2.BlockMetadata]]:
    """Blocks from `start` to the snapshot's end, so many to a message."""
    blocks = changed_blocks.within(found, start, record.size_bytes)
    limit = min(count or PIECE_MAX, PIECE_MAX)
    while piece := list(itertools.islice(blocks, limit)):
        yield [
            csi_pb2.BlockMetadata(byte_offset=each.offset, size_bytes=each.length) for each in piece
        ]
