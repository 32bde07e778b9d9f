"""Changed and allocated blocks, against a comparison of bytes (C-361 to C-366)."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator import copies
from crust_conformance.orchestrator.calls import UNKNOWN, Code
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.volume_capabilities import block

_STEP = 4096
_FEW = 2
Allocated = csi_pb2.GetMetadataAllocatedResponse
Delta = csi_pb2.GetMetadataDeltaResponse


def test_c361_allocated_blocks_cover_all_data(co: Co) -> None:
    volume, target = co.used(block())
    _write(co, target, parts=(0, 3, 9), seed=1)
    snapshot, target = copies.of_device(co, volume, target)
    request = csi_pb2.GetMetadataAllocatedRequest(
        snapshot_id=snapshot.snapshot_id, max_results=_FEW
    )
    size = co.host.size_bytes(target)
    ranges = _ranges(co.ask(request), size, _FEW)
    content = co.host.read(target, size)
    zero = bytes(_STEP)
    for offset in range(0, len(content), _STEP):
        if content[offset : offset + _STEP] != zero[: len(content) - offset]:
            assert _covered(ranges, offset), f"the data at {offset} is not reported"


def test_c362_delta_covers_all_changes(co: Co) -> None:
    volume, target = co.used(block())
    size = co.host.size_bytes(target)
    _write(co, target, parts=(0, 3, 9), seed=1)
    base_data = co.host.read(target, size)
    base, target = copies.of_device(co, volume, target)
    _write(co, target, parts=(3, 12), seed=2)
    latest_data = co.host.read(target, size)
    latest, target = copies.of_device(co, volume, target)
    request = csi_pb2.GetMetadataDeltaRequest(
        base_snapshot_id=base.snapshot_id, target_snapshot_id=latest.snapshot_id, max_results=_FEW
    )
    ranges = _ranges(_delta(co, request), size, _FEW)
    for offset in range(0, size, _STEP):
        if base_data[offset : offset + _STEP] != latest_data[offset : offset + _STEP]:
            assert _covered(ranges, offset), f"the change at {offset} is not reported"
    with co.beyond():
        assert sum(length for _, length in ranges) < size, "everything is reported as changed"


def test_c363_allocated_blocks_begin_at_starting_offset(co: Co) -> None:
    volume, target = co.used(block())
    _write(co, target, parts=(0, 3, 9), seed=1)
    snapshot, target = copies.of_device(co, volume, target)
    size = co.host.size_bytes(target)
    request = csi_pb2.GetMetadataAllocatedRequest(
        snapshot_id=snapshot.snapshot_id, starting_offset=size // 4
    )
    ranges = _ranges(co.ask(request), size)
    assert all(offset + length > size // 4 for offset, length in ranges)
    assert _covered(ranges, size // 16 * 9)
    request.starting_offset = 4 * size
    co.answered(request, Code.OUT_OF_RANGE)


def test_c364_metadata_needs_snapshots(co: Co) -> None:
    allocated = csi_pb2.GetMetadataAllocatedRequest(snapshot_id=UNKNOWN)
    co.refused_without(allocated, "snapshot_id")
    co.answered(allocated, Code.NOT_FOUND)
    delta = csi_pb2.GetMetadataDeltaRequest(base_snapshot_id=UNKNOWN, target_snapshot_id=UNKNOWN)
    co.refused_without(delta, "target_snapshot_id")
    co.answered(delta, Code.NOT_FOUND)


def test_c365_metadata_of_unwritten_volume_is_ok(co: Co) -> None:
    volume = co.volume(block())
    base, latest = (copies.snapshot(co, volume.volume_id).snapshot_id for _ in range(2))
    size = volume.capacity_bytes or co.options.parameters.size_bytes
    allocated = csi_pb2.GetMetadataAllocatedRequest(snapshot_id=base)
    _ranges(co.ask(allocated), size)
    delta = csi_pb2.GetMetadataDeltaRequest(base_snapshot_id=base, target_snapshot_id=latest)
    _ranges(_delta(co, delta), size)


def test_c366_delta_across_volumes_or_beyond_the_end_is_refused(co: Co) -> None:
    volume, other_volume = co.volume(block()), co.volume(block())
    base, latest = (copies.snapshot(co, volume.volume_id).snapshot_id for _ in range(2))
    foreign = copies.snapshot(co, other_volume.volume_id).snapshot_id
    request = csi_pb2.GetMetadataDeltaRequest
    size = volume.capacity_bytes or co.options.parameters.size_bytes
    beyond = request(base_snapshot_id=base, target_snapshot_id=latest, starting_offset=4 * size)
    co.answered(beyond, Code.OUT_OF_RANGE)
    mixed = request(base_snapshot_id=base, target_snapshot_id=foreign)
    co.answered(mixed, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION)


def _delta(co: Co, request: csi_pb2.GetMetadataDeltaRequest) -> list[Delta]:
    """The answer; the case is skipped for a driver that does not track changes, which only the call shows."""
    code, message = co.outcome(request)
    if code is Code.FAILED_PRECONDITION:
        pytest.skip(f"needs a volume whose changes are tracked: {message}")
    return co.ask(request)


def _write(co: Co, target: Path, *, parts: tuple[int, ...], seed: int) -> None:
    size = co.host.size_bytes(target)
    for part in parts:
        co.host.write(target, copies.noise(100 * seed + part), offset=size // 16 * part)


def _ranges(
    stream: Sequence[Allocated] | Sequence[Delta], size_bytes: int, few: int = 0
) -> list[tuple[int, int]]:
    assert len({message.block_metadata_type for message in stream}) <= 1, "block types are mixed"
    ranges: list[tuple[int, int]] = []
    for message in stream:
        assert message.volume_capacity_bytes == size_bytes
        assert not few or len(message.block_metadata) <= few, "more than max_results in a message"
        ranges += [(extent.byte_offset, extent.size_bytes) for extent in message.block_metadata]
    if any(message.block_metadata_type == csi_pb2.FIXED_LENGTH for message in stream):
        assert len({length for _, length in ranges}) <= 1, "FIXED_LENGTH, and the lengths differ"
    end = 0
    for offset, length in ranges:
        assert offset >= end, "not ascending, or overlapping"
        assert length > 0
        end = offset + length
    return ranges


def _covered(ranges: list[tuple[int, int]], offset: int) -> bool:
    return any(start <= offset < start + length for start, length in ranges)
