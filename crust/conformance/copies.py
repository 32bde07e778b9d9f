"""Snapshots, restores and clones as a CO makes them, and what is compared to trust them."""

import hashlib
import random

from crust.conformance.co import Co
from crust.wire.csi.v1 import csi_pb2

CHUNK = 64 * 1024


def snapshot_request(co: Co, volume_id: str, *, name: str = "") -> csi_pb2.CreateSnapshotRequest:
    """A CreateSnapshot that a driver must accept."""
    return csi_pb2.CreateSnapshotRequest(
        source_volume_id=volume_id,
        name=name or co.name("snapshot"),
        parameters=co.options.parameters.snapshot_parameters,
        secrets=co.options.parameters.secrets,
    )


def snapshot(co: Co, volume_id: str) -> csi_pb2.Snapshot:
    """A snapshot, ready to use; deleted in the end."""
    return take(co, snapshot_request(co, volume_id))


def take(co: Co, request: csi_pb2.CreateSnapshotRequest) -> csi_pb2.Snapshot:
    """CreateSnapshot, asked again until it is ready to use, as the snapshotter does."""
    made = co.finally_(co.controller.CreateSnapshot, request).snapshot
    co.undo(lambda: delete(co, made.snapshot_id))
    for _ in range(1000):
        if made.ready_to_use:
            return made
        made = co.finally_(co.controller.CreateSnapshot, request).snapshot
    raise AssertionError("the snapshot never becomes ready to use")


def delete(co: Co, snapshot_id: str) -> None:
    """DeleteSnapshot that must be OK."""
    request = csi_pb2.DeleteSnapshotRequest(
        snapshot_id=snapshot_id, secrets=co.options.parameters.secrets
    )
    co.finally_(co.controller.DeleteSnapshot, request)


def of_snapshot(snapshot_id: str) -> csi_pb2.VolumeContentSource:
    """A volume's content comes from a snapshot."""
    source = csi_pb2.VolumeContentSource.SnapshotSource(snapshot_id=snapshot_id)
    return csi_pb2.VolumeContentSource(snapshot=source)


def of_volume(volume_id: str) -> csi_pb2.VolumeContentSource:
    """A volume's content comes from a volume."""
    source = csi_pb2.VolumeContentSource.VolumeSource(volume_id=volume_id)
    return csi_pb2.VolumeContentSource(volume=source)


def noise(seed: int, size_bytes: int = 3 * CHUNK + 17) -> bytes:
    """Bytes that no other seed gives."""
    return random.Random(seed).randbytes(size_bytes)


def checksum(data: bytes) -> str:
    """What two contents are compared by, so that a failure does not print them."""
    return hashlib.sha256(data).hexdigest()
