"""A container orchestrator: the requests that it makes, and its calls of a CSI socket.

A request has the fields that each volume needs, and those that its caller names. A test of a malformed request
changes such a one.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from crust.core import volumes
from crust.rpc.messages import extensions
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

MIB = 1 << 20
MODE = csi_pb2.VolumeCapability.AccessMode
NAMED = {"crust.dev/runtime-handler": "kata"}
"""Context of a publish that names its handler: right after a start, one without a name waits for the grace's end."""

Answer = TypeVar("Answer")
Metadata = tuple[tuple[str, str], ...]
KNOWS_NODE_INFO: Metadata = ((extensions.KEY, extensions.NODE_INFO),)
"""Of a CO that asks the controller about nodes (specs/node-identity.md)."""


def capability(
    fs_type: str = "ext4",
    *,
    block: bool = False,
    mode: int | str = MODE.SINGLE_NODE_WRITER,
    **mount: Any,
) -> csi_pb2.VolumeCapability:
    """A filesystem's capability, or that of a raw block volume; `mount` has other fields of MountVolume."""
    number = MODE.Mode.Value(mode) if isinstance(mode, str) else MODE.Mode.ValueType(mode)
    made = csi_pb2.VolumeCapability(access_mode=MODE(mode=number))
    if block:
        made.block.SetInParent()
    else:
        made.mount.CopyFrom(csi_pb2.VolumeCapability.MountVolume(fs_type=fs_type, **mount))
    return made


def encoded(value: volumes.VolumeCapability, *, deferred: bool = False) -> csi_pb2.VolumeCapability:
    """A capability as a CO encodes it; with `deferred` the group goes into the fields for deferral."""
    pb = csi_pb2.VolumeCapability()
    pb.access_mode.mode = csi_pb2.VolumeCapability.AccessMode.Mode.ValueType(value.mode.value)
    if isinstance(value.access, volumes.BlockAccess):
        pb.block.SetInParent()
        return pb
    pb.mount.fs_type = value.access.fs_type
    pb.mount.mount_flags.extend(value.access.mount_flags)
    group = value.access.group
    if group is not None and deferred:
        pb.mount.volume_supplemental_group = str(group.gid)
        pb.mount.volume_supplemental_group_change_policy = group.policy.value
    elif group is not None:
        pb.mount.volume_mount_group = str(group.gid)
    return pb


def create_request(
    name: str = "pvc",
    *capabilities: csi_pb2.VolumeCapability,
    size: int = 64 * MIB,
    limit: int = 0,
    volume: str = "",
    snapshot: str = "",
    **fields: Any,
) -> csi_pb2.CreateVolumeRequest:
    """CreateVolume of `size` bytes; a copy of the volume or snapshot whose id is given."""
    request = csi_pb2.CreateVolumeRequest(
        name=name,
        volume_capabilities=capabilities or (capability(),),
        capacity_range=csi_pb2.CapacityRange(required_bytes=size, limit_bytes=limit),
        **fields,
    )
    if volume:
        request.volume_content_source.volume.volume_id = volume
    if snapshot:
        request.volume_content_source.snapshot.snapshot_id = snapshot
    return request


def stage_request(
    volume_id: str, staging: str, given: csi_pb2.VolumeCapability | None = None, **fields: Any
) -> csi_pb2.NodeStageVolumeRequest:
    return csi_pb2.NodeStageVolumeRequest(
        volume_id=volume_id,
        staging_target_path=staging,
        volume_capability=given or capability(),
        **fields,
    )


def publish_request(
    volume_id: str,
    target: str,
    given: csi_pb2.VolumeCapability | None = None,
    *,
    defer: bool = True,
    staging: str = "",
    **fields: Any,
) -> csi_pb2.NodePublishVolumeRequest:
    """NodePublishVolume, deferred by the CO's flag."""
    return csi_pb2.NodePublishVolumeRequest(
        volume_id=volume_id,
        staging_target_path=staging,
        target_path=target,
        volume_capability=given or capability(),
        defer_fs_ops=defer,
        **fields,
    )


class Co:
    """The calls of a CSI socket. A call has `answer_s`; it waits for a connection if `waits`."""

    def __init__(
        self,
        connected: grpc.aio.Channel,
        answer_s: float = 60,
        *,
        waits: bool = False,
        metadata: Metadata = (),
    ) -> None:
        self.channel = connected
        self._answer_s = answer_s
        self._waits = waits
        self._metadata = metadata
        self.identity: csi_pb2_grpc.IdentityAsyncStub = csi_pb2_grpc.IdentityStub(connected)
        self.controller: csi_pb2_grpc.ControllerAsyncStub = csi_pb2_grpc.ControllerStub(connected)
        self.groups: csi_pb2_grpc.GroupControllerAsyncStub = csi_pb2_grpc.GroupControllerStub(
            connected
        )
        self.node: csi_pb2_grpc.NodeAsyncStub = csi_pb2_grpc.NodeStub(connected)

    async def is_ready(self) -> bool:
        """Probe."""
        return (await self._call(self.identity.Probe, csi_pb2.ProbeRequest())).ready.value

    async def create(
        self, name: str = "pvc", *capabilities: csi_pb2.VolumeCapability, **fields: Any
    ) -> csi_pb2.Volume:
        request = create_request(name, *capabilities, **fields)
        return (await self._call(self.controller.CreateVolume, request)).volume

    async def delete(self, volume_id: str) -> None:
        request = csi_pb2.DeleteVolumeRequest(volume_id=volume_id)
        await self._call(self.controller.DeleteVolume, request)

    async def attach(
        self,
        volume_id: str,
        node_id: str,
        given: csi_pb2.VolumeCapability | None = None,
        **fields: Any,
    ) -> None:
        request = csi_pb2.ControllerPublishVolumeRequest(
            volume_id=volume_id, node_id=node_id, volume_capability=given or capability(), **fields
        )
        await self._call(self.controller.ControllerPublishVolume, request)

    async def detach(self, volume_id: str, node_id: str) -> None:
        request = csi_pb2.ControllerUnpublishVolumeRequest(volume_id=volume_id, node_id=node_id)
        await self._call(self.controller.ControllerUnpublishVolume, request)

    async def grow(
        self, volume_id: str, required: int, limit: int = 0, **fields: Any
    ) -> csi_pb2.ControllerExpandVolumeResponse:
        request = csi_pb2.ControllerExpandVolumeRequest(
            volume_id=volume_id,
            capacity_range=csi_pb2.CapacityRange(required_bytes=required, limit_bytes=limit),
            **fields,
        )
        return await self._call(self.controller.ControllerExpandVolume, request)

    async def modify(self, volume_id: str, **mutable: str) -> None:
        request = csi_pb2.ControllerModifyVolumeRequest(
            volume_id=volume_id, mutable_parameters=mutable
        )
        await self._call(self.controller.ControllerModifyVolume, request)

    async def capacity(self, **fields: Any) -> int:
        """GetCapacity; the available bytes."""
        request = csi_pb2.GetCapacityRequest(**fields)
        return (await self._call(self.controller.GetCapacity, request)).available_capacity

    async def confirms(self, volume_id: str, given: csi_pb2.VolumeCapability) -> bool:
        """ValidateVolumeCapabilities; what it does not confirm has a message."""
        request = csi_pb2.ValidateVolumeCapabilitiesRequest(
            volume_id=volume_id, volume_capabilities=[given]
        )
        answer = await self._call(self.controller.ValidateVolumeCapabilities, request)
        assert answer.HasField("confirmed") or answer.message
        return answer.HasField("confirmed")

    async def volumes(self) -> dict[str, csi_pb2.ListVolumesResponse.Entry]:
        """ListVolumes, by id."""
        answer = await self._call(self.controller.ListVolumes, csi_pb2.ListVolumesRequest())
        return {entry.volume.volume_id: entry for entry in answer.entries}

    async def snapshots(self) -> dict[str, csi_pb2.Snapshot]:
        """ListSnapshots, by id."""
        answer = await self._call(self.controller.ListSnapshots, csi_pb2.ListSnapshotsRequest())
        return {entry.snapshot.snapshot_id: entry.snapshot for entry in answer.entries}

    async def group(self, *volume_ids: str, name: str = "g") -> csi_pb2.VolumeGroupSnapshot:
        request = csi_pb2.CreateVolumeGroupSnapshotRequest(name=name, source_volume_ids=volume_ids)
        return (await self._call(self.groups.CreateVolumeGroupSnapshot, request)).group_snapshot

    async def delete_group(self, group: csi_pb2.VolumeGroupSnapshot) -> None:
        request = csi_pb2.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=group.group_snapshot_id,
            snapshot_ids=[snapshot.snapshot_id for snapshot in group.snapshots],
        )
        await self._call(self.groups.DeleteVolumeGroupSnapshot, request)

    async def snapshot(self, volume_id: str, name: str = "snap") -> csi_pb2.Snapshot:
        request = csi_pb2.CreateSnapshotRequest(source_volume_id=volume_id, name=name)
        return (await self._call(self.controller.CreateSnapshot, request)).snapshot

    async def delete_snapshot(self, snapshot_id: str) -> None:
        request = csi_pb2.DeleteSnapshotRequest(snapshot_id=snapshot_id)
        await self._call(self.controller.DeleteSnapshot, request)

    async def stage(
        self,
        volume_id: str,
        staging: str,
        given: csi_pb2.VolumeCapability | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> None:
        request = stage_request(volume_id, staging, given, **fields)
        await self._call(self.node.NodeStageVolume, request, timeout_s)

    async def unstage(self, volume_id: str, staging: str) -> None:
        request = csi_pb2.NodeUnstageVolumeRequest(volume_id=volume_id, staging_target_path=staging)
        await self._call(self.node.NodeUnstageVolume, request)

    async def publish(
        self,
        volume_id: str,
        target: str,
        given: csi_pb2.VolumeCapability | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> csi_pb2.NodePublishVolumeResponse:
        """NodePublishVolume, deferred by the CO's flag."""
        request = publish_request(volume_id, target, given, **fields)
        return await self._call(self.node.NodePublishVolume, request, timeout_s)

    async def unpublish(
        self, volume_id: str, target: str, *, timeout_s: float | None = None, flag: bool = False
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """NodeUnpublishVolume, without the flag: the record says that it is deferred."""
        request = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=volume_id, target_path=target, defer_fs_ops=flag
        )
        return await self._call(self.node.NodeUnpublishVolume, request, timeout_s)

    async def stats(
        self, volume_id: str, target: str, **fields: Any
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        request = csi_pb2.NodeGetVolumeStatsRequest(
            volume_id=volume_id, volume_path=target, **fields
        )
        return await self._call(self.node.NodeGetVolumeStats, request)

    async def expand(
        self, volume_id: str, path: str, required: int, limit: int = 0, **fields: Any
    ) -> csi_pb2.NodeExpandVolumeResponse:
        request = csi_pb2.NodeExpandVolumeRequest(
            volume_id=volume_id,
            volume_path=path,
            capacity_range=csi_pb2.CapacityRange(required_bytes=required, limit_bytes=limit),
            **fields,
        )
        return await self._call(self.node.NodeExpandVolume, request)

    async def _call(
        self, method: Callable[..., Awaitable[Answer]], request: Any, timeout_s: float | None = None
    ) -> Answer:
        answer = await method(
            request,
            timeout=timeout_s or self._answer_s,
            wait_for_ready=self._waits,
            metadata=self._metadata,
        )
        if answer is None:  # what gRPC makes of bytes that are no message
            raise PeerStatus(grpc.StatusCode.UNAVAILABLE, "the answer cannot be read")
        return answer
