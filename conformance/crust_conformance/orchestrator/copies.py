"""Snapshots, restores and clones as a CO creates them, and how their content is compared."""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from crust.wire.csi.v1 import csi_pb2
from crust.wire.csi.v1.csi_pb2 import Volume
from crust_conformance.orchestrator.calls import Code, Refusal
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.volume_capabilities import block

CHUNK = 64 * 1024
_PIECE = 4 * 1024 * 1024


def snapshot_request(co: Co, volume_id: str, *, name: str = "") -> csi_pb2.CreateSnapshotRequest:
    """A CreateSnapshot that a driver must accept."""
    return csi_pb2.CreateSnapshotRequest(
        source_volume_id=volume_id,
        name=name or co.name("snapshot"),
        parameters=co.options.parameters.snapshot_parameters,
    )


def snapshot(co: Co, volume_id: str) -> csi_pb2.Snapshot:
    """A snapshot, ready to use."""
    return take(co, snapshot_request(co, volume_id))


def take(co: Co, request: csi_pb2.CreateSnapshotRequest) -> csi_pb2.Snapshot:
    """CreateSnapshot, asked again until it is ready to use, as the snapshotter does."""
    return _ready(co, request, co.until_final(request)).snapshot


def _ready(co: Co, request: Message, answer: Any) -> Any:
    """The answer of CreateSnapshot or CreateVolumeGroupSnapshot in which the new object is ready to use."""
    for _ in range(1000):
        if all(created.ready_to_use for _, created in answer.ListFields()):
            return answer
        answer = co.until_final(request)
    raise AssertionError(f"{type(request).__name__}: its snapshot never becomes ready to use")


def of_device(co: Co, volume: Volume, target: Path) -> tuple[csi_pb2.Snapshot, Path]:
    """A snapshot of a published raw device, and the target of the device after it."""
    request = snapshot_request(co, volume.volume_id)
    answer, target = _of_published(co, request, volume, target)
    return answer.snapshot, target


def clone_device(co: Co, volume: Volume, target: Path) -> tuple[Volume, Path]:
    """A clone of a published raw device, as `of_device`."""
    request = co.create_request(block(), source=of_volume(volume.volume_id))
    answer, target = _of_published(co, request, volume, target)
    return answer.volume, target


def _of_published(co: Co, request: Message, volume: Volume, target: Path) -> tuple[Any, Path]:
    """The final answer. A driver cannot quiesce the writers of a raw device, so it may refuse to copy a used one."""
    reply = co.reply(request)
    is_refused = isinstance(reply, Refusal)
    if is_refused and reply.code is not Code.FAILED_PRECONDITION:
        raise reply
    if is_refused:
        co.release(volume, target)
        reply = co.until_final(request)
    if isinstance(reply, csi_pb2.CreateSnapshotResponse):
        reply = _ready(co, request, reply)
    return reply, co.use(volume, block()) if is_refused else target


def delete(co: Co, snapshot_id: str) -> None:
    """DeleteSnapshot that must be OK."""
    co.until_final(csi_pb2.DeleteSnapshotRequest(snapshot_id=snapshot_id))


def group_request(co: Co, volume_ids: Sequence[str]) -> csi_pb2.CreateVolumeGroupSnapshotRequest:
    """A CreateVolumeGroupSnapshot that a driver must accept."""
    return csi_pb2.CreateVolumeGroupSnapshotRequest(
        name=co.name("group"),
        source_volume_ids=volume_ids,
        parameters=co.options.parameters.group_parameters,
    )


def take_group(
    co: Co, request: csi_pb2.CreateVolumeGroupSnapshotRequest
) -> csi_pb2.VolumeGroupSnapshot:
    """CreateVolumeGroupSnapshot, asked again until it is ready to use."""
    return _ready(co, request, co.until_final(request)).group_snapshot


def members(group: csi_pb2.VolumeGroupSnapshot) -> tuple[str, list[tuple[str, str]]]:
    """The ids of a group and of its members."""
    pairs = [(snapshot.source_volume_id, snapshot.snapshot_id) for snapshot in group.snapshots]
    return group.group_snapshot_id, sorted(pairs)


def of_snapshot(snapshot_id: str) -> csi_pb2.VolumeContentSource:
    """The content source for a volume from a snapshot."""
    source = csi_pb2.VolumeContentSource.SnapshotSource(snapshot_id=snapshot_id)
    return csi_pb2.VolumeContentSource(snapshot=source)


def of_volume(volume_id: str) -> csi_pb2.VolumeContentSource:
    """The content source for a volume from a volume."""
    source = csi_pb2.VolumeContentSource.VolumeSource(volume_id=volume_id)
    return csi_pb2.VolumeContentSource(volume=source)


def noise(seed: int, size_bytes: int = 3 * CHUNK + 17) -> bytes:
    """Pseudo-random bytes, different for each seed."""
    return random.Random(seed).randbytes(size_bytes)


def checksum_of(co: Co, device: Path) -> str:
    """The checksum of a whole device, which may be larger than memory."""
    total = hashlib.sha256()
    for offset in range(0, co.host.size_bytes(device), _PIECE):
        total.update(co.host.read(device, _PIECE, offset=offset))
    return total.hexdigest()


def checksum(data: bytes) -> str:
    """The checksum of a content, so that a failed comparison does not print it."""
    return hashlib.sha256(data).hexdigest()
