"""GroupController and SnapshotMetadata."""

from collections.abc import Iterator
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from tests.support.memory_csi.controller import Controller
from tests.support.memory_csi.state import Code, Failure, check_map_size, check_text

_STEP = 4096


class Groups:
    """GroupController; one method per RPC."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._state = controller.state

    def CreateVolumeGroupSnapshot(self, request: Any) -> Any:
        check_text(request.name)
        check_map_size(request.parameters)
        if not request.source_volume_ids:
            raise Failure(Code.INVALID_ARGUMENT, "no sources")
        for group_id, (made, _) in self._state.groups.items():
            if made.name == request.name:
                if sorted(made.source_volume_ids) != sorted(request.source_volume_ids):
                    raise Failure(Code.ALREADY_EXISTS, "of other volumes")
                return csi_pb2.CreateVolumeGroupSnapshotResponse(
                    group_snapshot=self._group(group_id)
                )
        missing = [
            source_volume_id
            for source_volume_id in request.source_volume_ids
            if source_volume_id not in self._state.volumes
        ]
        if missing:
            raise Failure(Code.NOT_FOUND, "no such volume")
        group_id = f"group-{len(self._state.groups)}-{request.name[-8:]}"
        volumes = [
            self._state.volumes[source_volume_id] for source_volume_id in request.source_volume_ids
        ]
        members = self._members(volumes, group_id)
        kept = csi_pb2.CreateVolumeGroupSnapshotRequest()
        kept.CopyFrom(request)
        self._state.groups[group_id] = (kept, members)
        return csi_pb2.CreateVolumeGroupSnapshotResponse(group_snapshot=self._group(group_id))

    def _members(self, volumes: list[Any], group_id: str) -> list[str]:
        members = []
        for number, volume in enumerate(volumes):
            made = self._controller.take(volume, f"{group_id}-{number}", group_id)
            if "group-out-of-order" in self._controller.faults and number == 0:
                made.content.files["file"] = bytes(8)  # as if taken long before the second
            members.append(made.wire.snapshot_id)
        return members

    def _group(self, group_id: str) -> csi_pb2.VolumeGroupSnapshot:
        members = self._state.groups[group_id][1]
        wire = csi_pb2.VolumeGroupSnapshot(
            group_snapshot_id=group_id,
            snapshots=[self._state.snapshots[member].wire for member in members],
            ready_to_use=True,
        )
        wire.creation_time.seconds = 1
        return wire

    def _check_members(self, request: Any) -> None:
        check_text(request.group_snapshot_id)
        made = self._state.groups.get(request.group_snapshot_id)
        if made is not None and sorted(request.snapshot_ids) != sorted(made[1]):
            raise Failure(Code.INVALID_ARGUMENT, "other members")

    def GetVolumeGroupSnapshot(self, request: Any) -> Any:
        self._check_members(request)
        if request.group_snapshot_id not in self._state.groups:
            raise Failure(Code.NOT_FOUND, "no such group")
        wire = self._group(request.group_snapshot_id)
        return csi_pb2.GetVolumeGroupSnapshotResponse(group_snapshot=wire)

    def DeleteVolumeGroupSnapshot(self, request: Any) -> Any:
        self._check_members(request)
        _, members = self._state.groups.pop(request.group_snapshot_id, (None, []))
        for member in members:
            self._state.snapshots.pop(member, None)
        return csi_pb2.DeleteVolumeGroupSnapshotResponse()


class Metadata:
    """SnapshotMetadata; one generator per RPC."""

    def __init__(self, controller: Controller) -> None:
        self._state = controller.state
        self._faults = controller.faults

    def _content(self, snapshot_id: str) -> bytearray:
        if snapshot_id not in self._state.snapshots:
            raise Failure(Code.NOT_FOUND, "no such snapshot")
        content = self._state.snapshots[snapshot_id].content.raw
        if "empty-is-an-error" in self._faults and not any(content):
            raise Failure(Code.FAILED_PRECONDITION, "there is nothing in it")
        return content

    def GetMetadataAllocated(self, request: Any) -> Iterator[Any]:
        check_text(request.snapshot_id)
        content = self._content(request.snapshot_id)
        zero = bytes(_STEP)
        chosen = [at for at in range(0, len(content), _STEP) if content[at : at + _STEP] != zero]
        return self._stream(csi_pb2.GetMetadataAllocatedResponse, chosen, len(content), request)

    def GetMetadataDelta(self, request: Any) -> Iterator[Any]:
        check_text(request.base_snapshot_id)
        check_text(request.target_snapshot_id)
        one = self._content(request.base_snapshot_id)
        other = self._content(request.target_snapshot_id)
        snapshots = self._state.snapshots
        sources = {snapshots[request.base_snapshot_id].wire.source_volume_id}
        if sources != {snapshots[request.target_snapshot_id].wire.source_volume_id}:
            raise Failure(Code.INVALID_ARGUMENT, "of two volumes")
        everything = "delta-is-everything" in self._faults
        chosen = [
            at
            for at in range(0, len(other), _STEP)
            if everything or one[at : at + _STEP] != other[at : at + _STEP]
        ]
        return self._stream(csi_pb2.GetMetadataDeltaResponse, chosen, len(other), request)

    def _stream(self, kind: Any, chosen: list[int], size: int, request: Any) -> Iterator[Any]:
        if request.starting_offset >= size:
            raise Failure(Code.OUT_OF_RANGE, "beyond the volume")
        if "offset-ignored" not in self._faults:
            chosen = [at for at in chosen if at + _STEP > request.starting_offset]
        if "misses-blocks" in self._faults:
            chosen = chosen[:-3]
        if "blocks-descend" in self._faults:
            chosen.reverse()
        few = request.max_results or 1000
        if "ignores-max-results" in self._faults:
            few = 1000
        for start in range(0, len(chosen), few):
            blocks = [
                csi_pb2.BlockMetadata(byte_offset=at, size_bytes=_STEP)
                for at in chosen[start : start + few]
            ]
            if "fixed-lengths-differ" in self._faults and len(blocks) > 1:
                blocks[-1].size_bytes = _STEP // 2
            yield kind(
                block_metadata_type=csi_pb2.FIXED_LENGTH,
                volume_capacity_bytes=size,
                block_metadata=blocks,
            )
