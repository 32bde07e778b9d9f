"""Nodes of a cluster whose pools are in memory: an agent each, with a stateful driver's controller part behind it.

The drivers keep what a pool keeps: a record per volume and snapshot, the capacity, where a volume is published. What
is created twice, in two pools, can so be counted. They answer with the codes of crust's own driver.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from crust import errors, pool_ids
from crust.cluster.agent import Agent, Limits
from crust.cluster.protocol import Announcement, NodeSide
from crust.rpc.in_process.local import LocalServer
from crust.rpc.serving.health import Health
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

GIB = 1 << 30
KEY = "crust.dev/node"


class _Services(
    csi_pb2_grpc.ControllerServicer,
    csi_pb2_grpc.GroupControllerServicer,
    csi_pb2_grpc.SnapshotMetadataServicer,
):
    """All methods, unserved."""


_Base: Any = _Services


class SimulatedPool(_Base):  # type: ignore[misc]
    """The controller part of a driver, and `AnnouncedPool`."""

    def __init__(self, node_id: str, number: int, capacity: int = 100 * GIB) -> None:
        self.node_id = node_id
        self.ids = pool_ids.PoolIds(f"{number:016x}")
        self.capacity = capacity
        self.volumes: dict[str, csi_pb2.Volume] = {}
        self.snapshots: dict[str, csi_pb2.Snapshot] = {}
        self.groups: dict[str, list[str]] = {}
        """The members of each group of snapshots."""
        self.published: dict[str, str] = {}
        self.calls: list[str] = []
        self.lists = 0
        """How often snapshots were listed."""
        self.most_volumes = 0
        self.said: Announcement | None = None
        """What is announced instead of what there is now."""
        self.gate = asyncio.Event()
        """Changes wait for it."""
        self.gate.set()
        self.arrived = asyncio.Event()
        self.is_ready = True
        self.least_bytes = 0
        """Less is out of range, whatever stands."""
        self.list_gate = asyncio.Event()
        """ListVolumes waits for it, or fails meanwhile with `list_error`."""
        self.list_gate.set()
        self.list_error: errors.CrustError | None = None
        self.boot = ""
        """Another one for each agent."""
        self.restored = 0
        """How often the store had lost its history, where the store does not say it itself."""

    def pool_id(self) -> str:
        return self.ids.pool_id

    async def announcement(self) -> Announcement | None:
        if self.said is not None:
            return self.said
        free = self.free()
        return Announcement(
            node_id=self.node_id,
            pool_id=self.ids.pool_id,
            segments={KEY: self.node_id},
            capacity_bytes=free,
            maximum_bytes=free,
            volumes=len(self.volumes),
            max_volumes=self.most_volumes,
            is_ready=self.is_ready,
            boot=self.boot,
            restored=self.restored,
        )

    def free(self) -> int:
        return self.capacity - sum(each.capacity_bytes for each in self.volumes.values())

    async def CreateVolume(self, request: Any, context: Any) -> Any:
        await self._change("CreateVolume")
        volume_id = self.ids.volume_id(request.name)
        size = request.capacity_range.required_bytes or GIB
        if size < self.least_bytes:
            raise errors.OutOfRange("no volume has this size")
        there = self.volumes.get(volume_id)
        if there is not None and there.capacity_bytes != size:
            raise errors.Conflict("the volume exists already", why="its size differs")
        if there is None:
            self._check_new(request, size)
            there = csi_pb2.Volume(volume_id=volume_id, capacity_bytes=size)
            there.accessible_topology.add().segments[KEY] = self.node_id
            if request.HasField("volume_content_source"):
                there.content_source.CopyFrom(request.volume_content_source)
            self.volumes[volume_id] = there
        return csi_pb2.CreateVolumeResponse(volume=there)

    def _check_new(self, request: Any, size: int) -> None:
        if "unknown" in request.parameters:
            raise errors.InvalidRequest("the parameter is not known")
        requisite = request.accessibility_requirements.requisite
        if requisite and not any(each.segments[KEY] == self.node_id for each in requisite):
            raise errors.Exhausted("no volume can be made in the required topology")
        if size > self.free():
            raise errors.Exhausted("the pool is out of capacity")
        source = request.volume_content_source
        if source.HasField("volume") and source.volume.volume_id not in self.volumes:
            raise errors.NotFound("there is no such volume")

    async def DeleteVolume(self, request: Any, context: Any) -> Any:
        await self._change("DeleteVolume")
        self.ids.check(request.volume_id)
        self.volumes.pop(request.volume_id, None)
        return csi_pb2.DeleteVolumeResponse()

    async def ControllerPublishVolume(self, request: Any, context: Any) -> Any:
        await self._change("ControllerPublishVolume")
        self._find(request.volume_id)
        if request.node_id != self.node_id:
            raise errors.NotFound("there is no such node")
        self.published[request.volume_id] = request.node_id
        return csi_pb2.ControllerPublishVolumeResponse()

    async def ControllerUnpublishVolume(self, request: Any, context: Any) -> Any:
        await self._change("ControllerUnpublishVolume")
        self.published.pop(request.volume_id, None)
        return csi_pb2.ControllerUnpublishVolumeResponse()

    async def ControllerExpandVolume(self, request: Any, context: Any) -> Any:
        await self._change("ControllerExpandVolume")
        volume = self._find(request.volume_id)
        volume.capacity_bytes = request.capacity_range.required_bytes
        return csi_pb2.ControllerExpandVolumeResponse(capacity_bytes=volume.capacity_bytes)

    async def ControllerGetVolume(self, request: Any, context: Any) -> Any:
        return csi_pb2.ControllerGetVolumeResponse(volume=self._find(request.volume_id))

    async def ListVolumes(self, request: Any, context: Any) -> Any:
        if self.list_error is not None:
            raise self.list_error
        await self.list_gate.wait()
        ids = [each for each in sorted(self.volumes) if each > request.starting_token]
        count = request.max_entries or len(ids)
        response = csi_pb2.ListVolumesResponse(next_token=ids[count - 1] if ids[count:] else "")
        for each in ids[:count]:
            entry = response.entries.add(volume=self.volumes[each])
            entry.status.published_node_ids.extend(filter(None, [self.published.get(each)]))
        return response

    async def ListSnapshots(self, request: Any, context: Any) -> Any:
        self.lists += 1
        ids = [
            key
            for key, each in sorted(self.snapshots.items())
            if key > request.starting_token
            and request.snapshot_id in ("", key)
            and request.source_volume_id in ("", each.source_volume_id)
        ]
        count = request.max_entries or len(ids)
        response = csi_pb2.ListSnapshotsResponse(next_token=ids[count - 1] if ids[count:] else "")
        for each in ids[:count]:
            response.entries.add(snapshot=self.snapshots[each])
        return response

    async def GetCapacity(self, request: Any, context: Any) -> Any:
        if "unknown" in request.parameters:
            raise errors.InvalidRequest("the parameter is not known")
        response = csi_pb2.GetCapacityResponse(available_capacity=self.free())
        response.maximum_volume_size.value = self.free()
        response.minimum_volume_size.value = 1 << 20
        return response

    async def CreateSnapshot(self, request: Any, context: Any) -> Any:
        await self._change("CreateSnapshot")
        source = self._find(request.source_volume_id)
        made = csi_pb2.Snapshot(
            snapshot_id=self.ids.snapshot_id(request.name),
            source_volume_id=source.volume_id,
            size_bytes=source.capacity_bytes,
            ready_to_use=True,
        )
        self.snapshots[made.snapshot_id] = made
        return csi_pb2.CreateSnapshotResponse(snapshot=made)

    async def DeleteSnapshot(self, request: Any, context: Any) -> Any:
        await self._change("DeleteSnapshot")
        self.snapshots.pop(request.snapshot_id, None)
        return csi_pb2.DeleteSnapshotResponse()

    async def GetSnapshot(self, request: Any, context: Any) -> Any:
        if request.snapshot_id not in self.snapshots:
            raise errors.NotFound("there is no such snapshot")
        return csi_pb2.GetSnapshotResponse(snapshot=self.snapshots[request.snapshot_id])

    async def CreateVolumeGroupSnapshot(self, request: Any, context: Any) -> Any:
        await self._change("CreateVolumeGroupSnapshot")
        response = csi_pb2.CreateVolumeGroupSnapshotResponse()
        group = response.group_snapshot
        group.group_snapshot_id = self.ids.group_id(request.name)
        group.ready_to_use = True
        for each in request.source_volume_ids:
            member = csi_pb2.Snapshot(
                snapshot_id=self.ids.member_id(request.name, each),
                source_volume_id=self._find(each).volume_id,
                group_snapshot_id=group.group_snapshot_id,
                ready_to_use=True,
            )
            self.snapshots[member.snapshot_id] = member
            group.snapshots.append(member)
        self.groups[group.group_snapshot_id] = [each.snapshot_id for each in group.snapshots]
        return response

    async def DeleteVolumeGroupSnapshot(self, request: Any, context: Any) -> Any:
        await self._change("DeleteVolumeGroupSnapshot")
        for each in self.groups.pop(request.group_snapshot_id, []):
            del self.snapshots[each]
        return csi_pb2.DeleteVolumeGroupSnapshotResponse()

    async def GetVolumeGroupSnapshot(self, request: Any, context: Any) -> Any:
        if request.group_snapshot_id not in self.groups:
            raise errors.NotFound("there is no such group")
        if sorted(request.snapshot_ids) != sorted(self.groups[request.group_snapshot_id]):
            raise errors.InvalidRequest("snapshot_ids are not those of the group")
        response = csi_pb2.GetVolumeGroupSnapshotResponse()
        response.group_snapshot.group_snapshot_id = request.group_snapshot_id
        return response

    async def GetMetadataAllocated(self, request: Any, context: Any) -> AsyncIterator[Any]:
        blocks = [n * 4096 for n in range(10) if n * 4096 >= request.starting_offset]
        count = request.max_results or 4
        while blocks:
            piece, blocks = blocks[:count], blocks[count:]
            yield csi_pb2.GetMetadataAllocatedResponse(
                block_metadata_type=csi_pb2.FIXED_LENGTH,
                volume_capacity_bytes=GIB,
                block_metadata=[
                    csi_pb2.BlockMetadata(byte_offset=each, size_bytes=4096) for each in piece
                ],
            )

    async def ControllerGetNodeInfo(self, request: Any, context: Any) -> Any:
        return csi_pb2.ControllerGetNodeInfoResponse(
            max_volumes_per_node=7, published_volume_ids=sorted(self.published)
        )

    async def _change(self, name: str) -> None:
        self.calls.append(name)
        self.arrived.set()
        await self.gate.wait()

    def _find(self, volume_id: str) -> csi_pb2.Volume:
        if volume_id not in self.volumes:
            raise errors.NotFound(f"there is no volume {volume_id}")
        return self.volumes[volume_id]


@asynccontextmanager
async def joined(
    pool: SimulatedPool, store: NodeSide, limits: Limits | None = None
) -> AsyncIterator[Agent]:
    """The pool's node, in the cluster while the block runs."""
    pool.boot = uuid.uuid4().hex
    server: Any = LocalServer()
    server.open(pool.node_id, Health(), driver=lambda: "driver")
    csi_pb2_grpc.add_ControllerServicer_to_server(pool, server)
    csi_pb2_grpc.add_GroupControllerServicer_to_server(pool, server)
    csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(pool, server)
    agent = Agent(store, server, pool, limits or Limits(look_every_s=0.05, repeat_every_s=0.2))
    async with AsyncExitStack() as stack:
        stack.callback(server.close)
        task = asyncio.create_task(agent.run(), name=f"agent of {pool.node_id}")
        try:
            yield agent
        finally:
            task.cancel()
            await asyncio.wait([task])
