"""A CSI driver with state, on a socket of its own, that knows deferral and can be made to misbehave.

It is somebody else's driver on purpose: a plain grpc.aio server without crust's edge. It keeps what a driver keeps
(what is published where, and how), and every call that it got.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import grpc.aio

from crust.core import volumes
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
Rpc = csi_pb2.NodeServiceCapability.RPC
MIB = 1024 * 1024


@dataclass(frozen=True)
class Call:
    """One call as the driver saw it."""

    method: str
    request: Any
    metadata: tuple[tuple[str, str | bytes], ...]
    time_left_s: float | None


@dataclass(frozen=True)
class Failure:
    """A status to answer with."""

    code: grpc.StatusCode
    details: str
    trailing: tuple[tuple[str, str | bytes], ...] = ()


@dataclass
class Gate:
    """Where a call stops until it may go on."""

    entered: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Published:
    """What the driver did for a target."""

    volume_id: str
    deferred: bool
    readonly: bool


class FakeDriver(csi_pb2_grpc.NodeServicer, csi_pb2_grpc.IdentityServicer):
    """The Node and Identity services. `defers`: whether it advertises deferral."""

    def __init__(self, *, defers: bool = True) -> None:
        self.defers = defers
        self.name = "csi.example.com"
        self.ready = True
        self.expands = False
        """Whether its volumes can be expanded, as a plugin says it."""
        self.expands_at_node = True
        self.reports_stats = False
        self.mounts_instead = False
        self.published: dict[str, Published] = {}
        self.size_bytes: dict[str, int] = {}
        self.calls: list[Call] = []
        self.failures: dict[str, Failure] = {}
        self.failures_after: dict[str, Failure] = {}
        self.failing: dict[str, Failure] = {}
        """As `failures`, for every call until a test removes it."""
        self.after_publish: Callable[[], None] = lambda: None
        self.after_unpublish: Callable[[], None] = lambda: None
        self.gates: dict[str, Gate] = {}
        self.alter: Callable[[csi_pb2.DeferredMount], None] = lambda _: None
        self.identities: dict[str, tuple[int, int, int]] = {}
        self.io_limits = volumes.IoLimits()
        self.format: volumes.GuestFormat | None = None
        self.passphrase = ""
        self.findings: list[csi_pb2.VolumeHealth.VolumeHealthEntry] = []

    def called(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]

    async def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Context
    ) -> csi_pb2.NodePublishVolumeResponse:
        await self._enter("NodePublishVolume", request, context)
        deferred = request.defer_fs_ops and not self.mounts_instead
        wanted = Published(request.volume_id, deferred, request.readonly)
        there = self.published.setdefault(request.target_path, wanted)
        if there != wanted:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "published differently")
        self.after_publish()
        await self._leave("NodePublishVolume", context)
        if not deferred:
            return csi_pb2.NodePublishVolumeResponse()
        answer = self.deferred_mount(request)
        self.alter(answer)
        return csi_pb2.NodePublishVolumeResponse(deferred_mount=answer)

    async def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: Context
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        await self._enter("NodeUnpublishVolume", request, context)
        self.published.pop(request.target_path, None)
        self.after_unpublish()
        await self._leave("NodeUnpublishVolume", context)
        return csi_pb2.NodeUnpublishVolumeResponse()

    async def NodeStageVolume(
        self, request: csi_pb2.NodeStageVolumeRequest, context: Context
    ) -> csi_pb2.NodeStageVolumeResponse:
        await self._enter("NodeStageVolume", request, context)
        return csi_pb2.NodeStageVolumeResponse()

    async def NodeUnstageVolume(
        self, request: csi_pb2.NodeUnstageVolumeRequest, context: Context
    ) -> csi_pb2.NodeUnstageVolumeResponse:
        await self._enter("NodeUnstageVolume", request, context)
        return csi_pb2.NodeUnstageVolumeResponse()

    async def NodeGetVolumeStats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, context: Context
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        await self._enter("NodeGetVolumeStats", request, context)
        usage = csi_pb2.VolumeUsage(unit=csi_pb2.VolumeUsage.BYTES, total=7, used=3, available=4)
        return csi_pb2.NodeGetVolumeStatsResponse(usage=[usage])

    async def NodeExpandVolume(
        self, request: csi_pb2.NodeExpandVolumeRequest, context: Context
    ) -> csi_pb2.NodeExpandVolumeResponse:
        await self._enter("NodeExpandVolume", request, context)
        wanted = request.capacity_range.required_bytes
        size = max(self.size_of(request.volume_id), wanted)
        self.size_bytes[request.volume_id] = size
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=size)

    async def NodeGetCapabilities(
        self, request: csi_pb2.NodeGetCapabilitiesRequest, context: Context
    ) -> csi_pb2.NodeGetCapabilitiesResponse:
        await self._enter("NodeGetCapabilities", request, context)
        types = [Rpc.STAGE_UNSTAGE_VOLUME, *([Rpc.EXPAND_VOLUME] if self.expands_at_node else [])]
        types += [Rpc.GET_VOLUME_STATS] if self.reports_stats else []
        if self.defers and extensions.requested(context.invocation_metadata(), extensions.DEFERRAL):
            types += [Rpc.DEFER_FS_OPS, Rpc.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP]
        return csi_pb2.NodeGetCapabilitiesResponse(
            capabilities=[csi_pb2.NodeServiceCapability(rpc=Rpc(type=each)) for each in types]
        )

    async def NodeGetInfo(
        self, request: csi_pb2.NodeGetInfoRequest, context: Context
    ) -> csi_pb2.NodeGetInfoResponse:
        await self._enter("NodeGetInfo", request, context)
        return csi_pb2.NodeGetInfoResponse(node_id="node-1")

    async def GetPluginInfo(
        self, request: csi_pb2.GetPluginInfoRequest, context: Context
    ) -> csi_pb2.GetPluginInfoResponse:
        await self._fail(self.failing.get("GetPluginInfo"), context)
        return csi_pb2.GetPluginInfoResponse(name=self.name, vendor_version="1")

    async def GetPluginCapabilities(self, request: Any, context: Context) -> Any:
        answer = csi_pb2.GetPluginCapabilitiesResponse()
        if self.expands:
            online = csi_pb2.PluginCapability.VolumeExpansion.ONLINE
            answer.capabilities.add().volume_expansion.type = online
        return answer

    async def Probe(self, request: Any, context: Context) -> Any:
        await self._fail(self.failing.get("Probe"), context)
        answer = csi_pb2.ProbeResponse()
        answer.ready.value = self.ready
        return answer

    async def NodeGetVolumeHealth(
        self, request: csi_pb2.NodeGetVolumeHealthRequest, context: Context
    ) -> csi_pb2.NodeGetVolumeHealthResponse:
        found = csi_pb2.VolumeHealth(volume_id=request.volume_id, health_statuses=self.findings)
        return csi_pb2.NodeGetVolumeHealthResponse(volume_health=found)

    async def NodeGetStorageHealth(self, request: Any, context: Context) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not served")

    async def NodeGetID(self, request: Any, context: Context) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not served")

    def size_of(self, volume_id: str) -> int:
        return self.size_bytes.get(volume_id, 64 * MIB)

    def deferred_mount(self, request: csi_pb2.NodePublishVolumeRequest) -> csi_pb2.DeferredMount:
        """What an honest driver answers."""
        mount = request.volume_capability.mount
        major, minor, sequence = self.identities.get(request.volume_id) or identity_of(
            device_of(request.volume_id)
        )
        identity = csi_pb2.DeferredMount.DeviceIdentity(
            major=major, minor=minor, disk_sequence=sequence
        )
        answer = csi_pb2.DeferredMount(
            block_device=csi_pb2.DeferredMount.BlockDevice(
                path=device_of(request.volume_id), identity=identity
            ),
            fs_type=mount.fs_type or "ext4",
            mount_options=mount.mount_flags,
            supplemental_group=mount.volume_supplemental_group,
            supplemental_group_change_policy=mount.volume_supplemental_group_change_policy,
            readonly=request.readonly,
            capacity_bytes=self.size_of(request.volume_id),
            content_generation=1,
        )
        if self.io_limits != volumes.IoLimits():
            answer.io_limits.CopyFrom(csi_pb2.DeferredMount.IoLimits(**asdict(self.io_limits)))
        if self.format is not None:
            answer.format.SetInParent()
            answer.format.ext4_bytes_per_inode = self.format.ext4_bytes_per_inode or 0
            if self.format.ext4_reserved_percent is not None:
                answer.format.ext4_reserved_percent = self.format.ext4_reserved_percent
        if self.passphrase:
            answer.encryption = "luks"
            answer.secrets["passphrase"] = self.passphrase
        return answer

    async def _enter(self, method: str, request: Any, context: Context) -> None:
        metadata = tuple((key, value) for key, value in context.invocation_metadata() or ())
        self.calls.append(Call(method, request, metadata, context.time_remaining()))
        await self._fail(self.failing.get(method) or self.failures.pop(method, None), context)

    async def _leave(self, method: str, context: Context) -> None:
        gate = self.gates.get(method)
        if gate is not None:
            gate.entered.set()
            try:
                await gate.opened.wait()
            except asyncio.CancelledError:
                gate.cancelled.set()
                raise
        await self._fail(self.failures_after.pop(method, None), context)

    async def _fail(self, failure: Failure | None, context: Context) -> None:
        if failure is not None:
            await context.abort(failure.code, failure.details, failure.trailing)


def device_of(volume_id: str) -> str:
    """The device of a volume; nobody opens it."""
    return f"/dev/fake-{volume_id}"


def identity_of(device: str) -> tuple[int, int, int]:
    """Its major, minor and sequence, the same in every process."""
    number = zlib.crc32(device.encode())
    return 7, number % 2**20, 100 + number % 997


@asynccontextmanager
async def serving(driver: csi_pb2_grpc.NodeServicer, socket: str) -> AsyncIterator[grpc.aio.Server]:
    """The driver on its socket, while the block runs."""
    server = grpc.aio.server()
    csi_pb2_grpc.add_NodeServicer_to_server(driver, server)
    if isinstance(driver, csi_pb2_grpc.IdentityServicer):
        csi_pb2_grpc.add_IdentityServicer_to_server(driver, server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace=None)
