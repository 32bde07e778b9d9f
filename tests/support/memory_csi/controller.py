"""The Controller service."""

import itertools
from collections.abc import Iterable
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from tests.support.memory_csi.state import (
    HEALTHY,
    MIB,
    NODE,
    POOL_BYTES,
    SIDECARS,
    TOPOLOGY,
    Code,
    Content,
    Failure,
    Snapshot,
    State,
    Volume,
    check_capability,
    check_map,
    check_map_size,
    check_text,
    check_topology,
    page,
    topology,
)

_numbers = itertools.count(1)
SLOTS = 16
"""How many volumes a node can have."""


class Controller:
    """One method per RPC; raises `Failure`."""

    def __init__(self, state: State, faults: set[str], *, offline: bool = False) -> None:
        self.state = state
        self.faults = faults
        self.offline = offline

    def CreateVolume(self, request: Any) -> Any:
        self._check_create(request)
        for volume in self.state.volumes.values():
            if self._same_name(volume.request.name, request.name):
                self._check_same(volume.request, request)
                return csi_pb2.CreateVolumeResponse(volume=volume.wire)
        self._check_topology(request)
        size = request.capacity_range.required_bytes or MIB
        if "rounds-down" in self.faults:
            size = size // MIB * MIB
        if size > POOL_BYTES:
            if "keeps-failed" in self.faults:
                self._make(request, Content(bytearray()), MIB)
            raise Failure(Code.OUT_OF_RANGE, "too large")
        content = self._content(request, size)
        return csi_pb2.CreateVolumeResponse(volume=self._make(request, content, size))

    def _check_create(self, request: Any) -> None:
        check_text(request.name)
        if not request.volume_capabilities:
            raise Failure(Code.INVALID_ARGUMENT, "no capability")
        for capability in request.volume_capabilities:
            check_capability(capability)
        check_map_size(request.parameters)
        self._check_keys(request.parameters, "known")
        self._check_keys(request.mutable_parameters, "iops")
        wanted = request.capacity_range
        if wanted.required_bytes < 0 or 0 < wanted.limit_bytes < wanted.required_bytes:
            raise Failure(Code.OUT_OF_RANGE, "no such size")

    def _check_same(self, made: Any, request: Any) -> None:
        if "forgets-usage" in self.faults:
            return
        try:
            self._check_topology(request)
        except Failure:
            raise Failure(Code.ALREADY_EXISTS, "made elsewhere") from None
        lacks = made.HasField("volume_content_source") != request.HasField("volume_content_source")
        if lacks and "source-is-open" in self.faults:
            return
        if not _same(made, request):
            raise Failure(Code.ALREADY_EXISTS, "made differently")

    def _check_topology(self, request: Any) -> None:
        if "any-topology" not in self.faults:
            check_topology(request.accessibility_requirements)

    def _same_name(self, one: str, other: str) -> bool:
        if "slash-is-underscore" in self.faults:
            return one.replace("/", "_") == other.replace("/", "_")
        return one == other and "never-idempotent" not in self.faults

    def _content(self, request: Any, size: int) -> Content:
        if not request.HasField("volume_content_source"):
            return Content(bytearray(size), {}, 0)
        kind = request.volume_content_source.WhichOneof("type")
        source: Snapshot | Volume | None
        if kind == "snapshot":
            source = self.state.snapshots.get(request.volume_content_source.snapshot.snapshot_id)
        else:
            source = self.state.volumes.get(request.volume_content_source.volume.volume_id)
        if source is None:
            raise Failure(Code.NOT_FOUND, "no such source")
        content = source.content
        if size < len(content.raw):
            raise Failure(Code.OUT_OF_RANGE, "smaller than its source")
        if "clone-shares" in self.faults and kind == "volume":
            return content
        if "clone-torn" in self.faults and kind == "volume":
            return Content(bytearray(size), dict(content.files), content.fs_bytes)
        copied = Content(bytearray(), {}) if "restore-empty" in self.faults else content.copy()
        if "restore-torn" in self.faults and kind == "snapshot":
            copied.raw[: MIB // 2] = bytes(MIB // 2)
        copied.raw.extend(bytes(size - len(copied.raw)))
        return copied

    def _make(self, request: Any, content: Content, size: int) -> csi_pb2.Volume:
        wire = csi_pb2.Volume(
            volume_id=f"vol-{next(_numbers):06}",
            capacity_bytes=size,
            volume_context={"of": "memory"},
            accessible_topology=[topology()],
            content_source=request.volume_content_source
            if request.HasField("volume_content_source")
            else None,
        )
        kept = csi_pb2.CreateVolumeRequest()
        kept.CopyFrom(request)
        self.state.volumes[wire.volume_id] = Volume(kept, wire, content)
        return wire

    def DeleteVolume(self, request: Any) -> Any:
        check_text(request.volume_id)
        volume = self.state.volumes.get(request.volume_id)
        if volume is not None and (volume.staged or self.state.is_used(volume)):
            if "deletes-in-use" not in self.faults:
                raise Failure(Code.FAILED_PRECONDITION, "in use")
            volume.content.files.clear()
            raise Failure(Code.FAILED_PRECONDITION, "in use, and gone")
        if "delete-is-nothing" not in self.faults:
            self.state.volumes.pop(request.volume_id, None)
        self._lose_copies(request.volume_id)
        return csi_pb2.DeleteVolumeResponse()

    def _lose_copies(self, volume_id: str) -> None:
        """What a driver does whose copies are not copies."""
        if "clones-die" in self.faults:
            for volume in self.state.volumes.values():
                if volume.request.volume_content_source.volume.volume_id == volume_id:
                    volume.content.files.clear()
        if "snapshots-die" in self.faults:
            for snapshot in self.state.snapshots.values():
                if snapshot.wire.source_volume_id == volume_id:
                    snapshot.content = Content(bytearray())

    def ValidateVolumeCapabilities(self, request: Any) -> Any:
        check_text(request.volume_id)
        if not request.volume_capabilities:
            raise Failure(Code.INVALID_ARGUMENT, "no capability")
        volume = self.state.find(request.volume_id)
        check_map(request.volume_context)
        kinds = {wanted.WhichOneof("access_type") for wanted in volume.request.volume_capabilities}
        for capability in request.volume_capabilities:
            if capability.WhichOneof("access_type") not in kinds:
                return csi_pb2.ValidateVolumeCapabilitiesResponse(message="not made for this")
            if (
                capability.mount.fs_type not in ("", "ext4")
                and "confirms-the-first" not in self.faults
            ):
                return csi_pb2.ValidateVolumeCapabilitiesResponse(message="no such filesystem")
            if capability.access_mode.mode == 7 and "a-mode-is-lost" in self.faults:
                return csi_pb2.ValidateVolumeCapabilitiesResponse(message="no such mode")
        if request.volume_context and request.volume_context != volume.wire.volume_context:
            return csi_pb2.ValidateVolumeCapabilitiesResponse(message="another context")
        confirmed = csi_pb2.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=request.volume_context,
            volume_capabilities=request.volume_capabilities,
            parameters=request.parameters,
        )
        return csi_pb2.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    def ListVolumes(self, request: Any) -> Any:
        inline = "lists-ephemeral" in self.faults
        ids = [
            volume for volume in sorted(self.state.volumes) if inline or volume.startswith("vol-")
        ]
        listed, token = self._page(ids, request)
        entries = [self._entry(self.state.volumes[volume_id]) for volume_id in listed]
        return csi_pb2.ListVolumesResponse(entries=entries, next_token=token)

    def _page(self, ids: list[str], request: Any) -> tuple[list[str], str]:
        return page(
            ids,
            request.max_entries,
            request.starting_token,
            by_position="token-is-index" in self.faults,
        )

    def _entry(self, volume: Volume) -> csi_pb2.ListVolumesResponse.Entry:
        status = csi_pb2.ListVolumesResponse.VolumeStatus(
            published_node_ids=volume.attached, volume_condition=HEALTHY
        )
        return csi_pb2.ListVolumesResponse.Entry(volume=volume.wire, status=status)

    def ControllerGetVolume(self, request: Any) -> Any:
        volume = self.state.find(request.volume_id)
        answer = csi_pb2.ControllerGetVolumeResponse(volume=volume.wire)
        answer.status.published_node_ids.extend(volume.attached)
        answer.status.volume_condition.CopyFrom(HEALTHY)
        return answer

    def ControllerGetVolumeHealth(self, request: Any) -> Any:
        self.state.find(request.volume_id)
        health = csi_pb2.VolumeHealth(volume_id=request.volume_id)
        return csi_pb2.ControllerGetVolumeHealthResponse(volume_health=health)

    def ControllerListVolumeHealth(self, request: Any) -> Any:
        page([], request.max_entries, request.starting_token)
        return csi_pb2.ControllerListVolumeHealthResponse()

    def GetCapacity(self, request: Any) -> Any:
        check_map_size(request.parameters)
        asked = dict(request.accessible_topology.segments)
        reachable = asked in ({}, TOPOLOGY) or "any-topology" in self.faults
        return csi_pb2.GetCapacityResponse(available_capacity=POOL_BYTES if reachable else 0)

    def ControllerGetNodeInfo(self, request: Any) -> Any:
        check_text(request.node_id, 256)
        if request.node_id != NODE:
            raise Failure(Code.NOT_FOUND, "no such node")
        taken = self._on_node(request.node_id)
        known = set(request.published_volume_ids)
        unknown = set(taken) - known if known and "counts-all" not in self.faults else ()
        return csi_pb2.ControllerGetNodeInfoResponse(
            max_volumes_per_node=max(SLOTS - len(unknown), 1),
            accessible_topology=topology(),
            published_volume_ids=taken,
        )

    def _on_node(self, node_id: str) -> list[str]:
        return [key for key, volume in self.state.volumes.items() if node_id in volume.attached]

    def ControllerPublishVolume(self, request: Any) -> Any:
        check_text(request.volume_id)
        check_text(request.node_id, 256)
        check_capability(request.volume_capability)
        volume = self.state.find(request.volume_id)
        if request.node_id not in (NODE, "node-2"):
            raise Failure(Code.NOT_FOUND, "no such node")
        others = [node for node in volume.attached if node != request.node_id]
        if others:
            raise Failure(Code.FAILED_PRECONDITION, f"attached to {others[0]}")
        taken = self._on_node(request.node_id)
        if request.volume_id not in taken and len(taken) >= SLOTS:
            raise Failure(Code.RESOURCE_EXHAUSTED, "the node is full")
        volume.readonly = request.readonly
        how = request.volume_capability.SerializeToString() + bytes([request.readonly])
        if volume.attached.setdefault(request.node_id, how) != how:
            raise Failure(Code.ALREADY_EXISTS, "attached differently")
        return csi_pb2.ControllerPublishVolumeResponse(publish_context={"attached": "yes"})

    def ControllerUnpublishVolume(self, request: Any) -> Any:
        check_text(request.volume_id)
        volume = self.state.volumes.get(request.volume_id)
        if volume is not None and request.node_id:
            volume.attached.pop(request.node_id, None)
        elif volume is not None and "detach-needs-node" not in self.faults:
            volume.attached.clear()
        return csi_pb2.ControllerUnpublishVolumeResponse()

    def ControllerExpandVolume(self, request: Any) -> Any:
        check_text(request.volume_id)
        if not request.HasField("capacity_range"):
            raise Failure(Code.INVALID_ARGUMENT, "no size")
        volume = self.state.find(request.volume_id)
        if request.HasField("volume_capability"):
            check_capability(request.volume_capability)
        if self.state.is_used(volume) and self.offline:
            raise Failure(Code.FAILED_PRECONDITION, "in use")
        wanted = request.capacity_range
        size = max(volume.wire.capacity_bytes, wanted.required_bytes)
        if "shrinks" in self.faults:
            size = wanted.required_bytes
        if size > POOL_BYTES or 0 < wanted.limit_bytes < size:
            raise Failure(Code.OUT_OF_RANGE, "no such size")
        volume.wire.capacity_bytes = size
        if "device-stays" not in self.faults:
            volume.content.raw.extend(bytes(max(0, size - len(volume.content.raw))))
        return csi_pb2.ControllerExpandVolumeResponse(
            capacity_bytes=size, node_expansion_required=request.volume_capability.HasField("mount")
        )

    def ControllerModifyVolume(self, request: Any) -> Any:
        check_text(request.volume_id)
        self._check_keys(request.mutable_parameters, "iops")
        self.state.find(request.volume_id).modified.update(request.mutable_parameters)
        return csi_pb2.ControllerModifyVolumeResponse()

    def _check_keys(self, keys: Iterable[str], known: str) -> None:
        for key in keys:
            sidecar = key.startswith(SIDECARS) and "no-sidecars" not in self.faults
            if key != known and not sidecar:
                raise Failure(Code.INVALID_ARGUMENT, "an unknown key")

    def CreateSnapshot(self, request: Any) -> Any:
        check_text(request.source_volume_id)
        check_text(request.name)
        check_map_size(request.parameters)
        self._check_topology(request)
        for snapshot in self.state.snapshots.values():
            if snapshot.name == request.name:
                if snapshot.wire.source_volume_id != request.source_volume_id:
                    raise Failure(Code.ALREADY_EXISTS, "of another volume")
                return csi_pb2.CreateSnapshotResponse(snapshot=snapshot.wire)
        volume = self.state.find(request.source_volume_id)
        return csi_pb2.CreateSnapshotResponse(snapshot=self.take(volume, request.name).wire)

    def take(self, volume: Volume, name: str, group: str = "") -> Snapshot:
        wire = csi_pb2.Snapshot(
            snapshot_id=f"snap-{next(_numbers):06}",
            source_volume_id=volume.wire.volume_id,
            size_bytes=len(volume.content.raw),
            ready_to_use=True,
            group_snapshot_id=group,
            accessible_topology=[topology()] if self.state.places_snapshots else [],
        )
        wire.creation_time.seconds = 1
        content = volume.content if "snapshot-shares" in self.faults else volume.content.copy()
        made = self.state.snapshots[wire.snapshot_id] = Snapshot(wire, name, content)
        return made

    def DeleteSnapshot(self, request: Any) -> Any:
        check_text(request.snapshot_id)
        made = self.state.snapshots.get(request.snapshot_id)
        if made is not None and made.wire.group_snapshot_id:
            raise Failure(Code.INVALID_ARGUMENT, "a member of a group")
        self.state.snapshots.pop(request.snapshot_id, None)
        if "restores-die" in self.faults:
            for volume in self.state.volumes.values():
                source = volume.request.volume_content_source
                if source.snapshot.snapshot_id == request.snapshot_id:
                    volume.content.files.clear()
        return csi_pb2.DeleteSnapshotResponse()

    def GetSnapshot(self, request: Any) -> Any:
        check_text(request.snapshot_id)
        if request.snapshot_id not in self.state.snapshots:
            raise Failure(Code.NOT_FOUND, "no such snapshot")
        wire = self.state.snapshots[request.snapshot_id].wire
        return csi_pb2.GetSnapshotResponse(snapshot=wire)

    def ListSnapshots(self, request: Any) -> Any:
        chosen = [
            key
            for key, snapshot in sorted(self.state.snapshots.items())
            if request.snapshot_id in ("", key)
            and request.source_volume_id in ("", snapshot.wire.source_volume_id)
        ]
        listed, token = self._page(chosen, request)
        entry = csi_pb2.ListSnapshotsResponse.Entry
        entries = [entry(snapshot=self.state.snapshots[snapshot_id].wire) for snapshot_id in listed]
        return csi_pb2.ListSnapshotsResponse(entries=entries, next_token=token)


def _same(one: Any, other: Any) -> bool:
    return all(
        getattr(one, field) == getattr(other, field)
        for field in (
            "capacity_range",
            "parameters",
            "volume_content_source",
            "volume_capabilities",
        )
    )
