"""A backup of a CSI volume while it is written: a snapshot, its allocated blocks, later only the changed ones.

    python -m examples.backup SOCKET WORK DIRECTORY take VOLUME SIZE     the next backup of a volume, in DIRECTORY
    python -m examples.backup SOCKET WORK DIRECTORY restore NAME         a new volume from all backups in DIRECTORY

The socket is the one that the kubelet of this node calls, of a driver with CSI's SnapshotMetadata. The first backup
is a full one. Each later one has the blocks that changed since the snapshot before it, which is deleted when the new
backup is complete: so the pool keeps one snapshot. A backup appears by a rename, and is never changed. The snapshot
is read, and the new volume written, as a raw block volume below WORK, a directory below the kubelet's that the
script removes. The next run finishes what a killed one began.

It refuses what it cannot tell: a driver that knows no changed blocks fails the call, and nothing is kept of it. It
never writes to a volume that holds something: a restore that was killed is deleted, and begun again.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import grpc

from crust.wire.csi.v1 import csi_pb2 as csi
from crust.wire.csi.v1 import csi_pb2_grpc

_PIECE_BYTES = 1 << 20
_SIGNED_BYTES = 128 << 10  # where each filesystem has its signature, Btrfs the last one
_WRITER = csi.VolumeCapability.AccessMode(mode=csi.VolumeCapability.AccessMode.SINGLE_NODE_WRITER)
BLOCK = csi.VolumeCapability(block=csi.VolumeCapability.BlockVolume(), access_mode=_WRITER)
FILESYSTEM = csi.VolumeCapability(
    mount=csi.VolumeCapability.MountVolume(fs_type="ext4"), access_mode=_WRITER
)


def _whole(data: bytes, count: int, path: Path) -> bytes:
    """The data; ends the program if it is not all that was asked for: a backup with a gap is none."""
    if len(data) != count:
        sys.exit(f"error: {path}: {len(data)} bytes were read of {count}")
    return data


class Backups:
    """The backups of one volume in a directory, made through a driver's socket."""

    def __init__(self, channel: grpc.Channel, work: Path, directory: Path) -> None:
        self._controller = csi_pb2_grpc.ControllerStub(channel)
        self._node = csi_pb2_grpc.NodeStub(channel)
        self._metadata = csi_pb2_grpc.SnapshotMetadataStub(channel)
        self._directory = directory
        self._work = work

    def take(self, volume_id: str, size: int) -> Path:
        """The next backup of the volume, which has `size` bytes; the snapshot before it is deleted."""
        earlier = self._all()
        base = _header(earlier[-1])["snapshot"] if earlier else ""
        number = len(earlier)  # `_all` has checked that no other file has it
        request = csi.CreateSnapshotRequest(
            source_volume_id=volume_id, name=f"{volume_id}-{number}"
        )
        snapshot = self._controller.CreateSnapshot(request).snapshot.snapshot_id
        path = self._directory / f"{number:04}.backup"
        part = path.with_suffix(".part")
        source = csi.VolumeContentSource()
        source.snapshot.snapshot_id = snapshot
        made = self._create(f"read-{snapshot}", size, source, BLOCK)
        try:
            with part.open("wb") as file, self._device(made) as device:
                file.write(json.dumps(Header(snapshot=snapshot, size=size)).encode() + b"\n")
                for offset, length in self._blocks(base, snapshot):
                    for piece in range(offset, min(offset + length, size), _PIECE_BYTES):
                        count = min(_PIECE_BYTES, offset + length - piece, size - piece)
                        file.write(f"{piece} {count}\n".encode())
                        file.write(_whole(os.pread(device, count, piece), count, path))
                file.flush()
                os.fsync(file.fileno())
        finally:
            self._controller.DeleteVolume(csi.DeleteVolumeRequest(volume_id=made))
        part.rename(path)
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        # before the snapshot goes which the next backup would need without this one
        os.fsync(directory)
        os.close(directory)
        for before in earlier[-2:]:
            old = _header(before)["snapshot"]
            self._controller.DeleteSnapshot(csi.DeleteSnapshotRequest(snapshot_id=old))
        return path

    def restore(self, name: str) -> str:
        """The id of a new volume called `name`, with what the last backup saw; it can be mounted.

        Ends the program if a volume of this name exists and is not blank: CreateVolume answers with that one.
        """
        backups = self._all()
        if not backups:
            sys.exit(f"error: {self._directory} holds no backup")
        for path in backups:  # before anything is made
            for _ in _pieces(path):
                pass
        made = self._create(name, _header(backups[-1])["size"], None, FILESYSTEM, BLOCK)
        with self._device(made) as device:
            if any(os.pread(device, _SIGNED_BYTES, 0)):
                sys.exit(
                    f"error: volume {made} is called {name} and is not blank: choose another name"
                )
            for path in backups:
                for offset, piece in _pieces(path):
                    if os.pwrite(device, piece, offset) != len(piece):
                        sys.exit(
                            f"error: volume {made} is not complete, delete it: it took a part of {path}"
                        )
            os.fsync(device)
        return made

    def _all(self) -> list[Path]:
        """The backups in their order; ends the program if one is missing, which the later ones need."""
        found = sorted(self._directory.glob("*.backup"))
        wanted = [f"{number:04}.backup" for number in range(len(found))]
        if [path.name for path in found] != wanted:
            sys.exit(f"error: {self._directory} must hold {', '.join(wanted)}: a backup is missing")
        return found

    def _blocks(self, base: str, snapshot: str) -> Iterator[tuple[int, int]]:
        answers: Iterable[csi.GetMetadataDeltaResponse | csi.GetMetadataAllocatedResponse]
        if base:
            delta = csi.GetMetadataDeltaRequest(base_snapshot_id=base, target_snapshot_id=snapshot)
            answers = self._metadata.GetMetadataDelta(delta)
        else:
            allocated = csi.GetMetadataAllocatedRequest(snapshot_id=snapshot)
            answers = self._metadata.GetMetadataAllocated(allocated)
        for answer in answers:
            for block in answer.block_metadata:
                yield block.byte_offset, block.size_bytes

    def _create(
        self,
        name: str,
        size: int,
        source: csi.VolumeContentSource | None,
        *capabilities: csi.VolumeCapability,
    ) -> str:
        request = csi.CreateVolumeRequest(
            name=name,
            capacity_range=csi.CapacityRange(required_bytes=size),
            volume_capabilities=capabilities,
            volume_content_source=source,
        )
        return self._controller.CreateVolume(request).volume.volume_id

    @contextmanager
    def _device(self, volume_id: str) -> Iterator[int]:
        """A descriptor of the volume's device, while the block runs."""
        staging, target = self._work / "staging", self._work / "pod" / "device"
        for directory in (staging, target.parent):
            directory.mkdir(parents=True, exist_ok=True)
        stage = csi.NodeStageVolumeRequest(
            volume_id=volume_id, staging_target_path=str(staging), volume_capability=BLOCK
        )
        publish = csi.NodePublishVolumeRequest(
            volume_id=volume_id,
            staging_target_path=str(staging),
            target_path=str(target),
            volume_capability=BLOCK,
        )
        try:
            self._node.NodeStageVolume(stage)
            self._node.NodePublishVolume(publish)
            descriptor = os.open(target, os.O_RDWR)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        finally:
            self._node.NodeUnpublishVolume(
                csi.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=str(target))
            )
            self._node.NodeUnstageVolume(
                csi.NodeUnstageVolumeRequest(volume_id=volume_id, staging_target_path=str(staging))
            )
            # one by one, each empty: what somebody else has there stays
            for directory in (target.parent, staging, self._work):
                directory.rmdir()


class Header(TypedDict):
    """The first line of a backup."""

    snapshot: str
    size: int


def _header(path: Path) -> Header:
    with path.open("rb") as file:
        header: Header = json.loads(file.readline())
    return header


def _pieces(path: Path) -> Iterator[tuple[int, bytes]]:
    """The pieces of a backup, each with its offset; ends the program where one is cut."""
    with path.open("rb") as file:
        file.readline()
        while line := file.readline():
            offset, count = map(int, line.split())
            yield offset, _whole(file.read(count), count, path)


def main(socket: str, work: str, directory: str, command: str, *words: str) -> None:
    """Take a backup and print its file, or restore and print the new volume's id."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        backups = Backups(channel, Path(work), Path(directory))
        if command == "take":
            volume_id, size = words
            done = str(backups.take(volume_id, int(size)))
        else:
            (name,) = words
            done = backups.restore(name)
    sys.stdout.write(f"{done}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
