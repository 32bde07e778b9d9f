"""The storage side's door: KEP-2857's Runtime service, called by shims and by drivers that implement the KEP.

A shim asks by target path; the record says which handler has the volume, and the handler's own socket is asked.
Numbers that come back are a guest's word in the end, and are checked before anybody believes them.
"""

import asyncio
from typing import Any

import grpc.aio

from crust import errors, volumes
from crust.handoff.record import Record
from crust.proxy.deferred import DeferredVolumes
from crust.proxy.devices import Devices
from crust.proxy.handlers import Handlers
from crust.proxy.peers import HandlerPeers
from crust.proxy.stage import RuntimeStage
from crust.rpc import crust_v1
from crust.wire.v1 import runtime_pb2, runtime_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class NotInSandbox(errors.NotReady):
    """The volume is handed over, and no sandbox has mounted it."""

    def __init__(self, target: str) -> None:
        super().__init__(
            f"the volume at {target} is not mounted",
            why="it is handed to a runtime, and no sandbox has it now",
            hint="start the pod's sandbox; usage is known once it has mounted the volume",
        )


class DeviceTooSmall(errors.NotReady):
    """The device has not grown yet."""

    def __init__(self, device: str, size_bytes: int, wanted: volumes.CapacityRange) -> None:
        super().__init__(
            f"the filesystem on {device} cannot grow to {wanted.required_bytes} bytes",
            why=f"the device has {size_bytes} bytes",
            hint="expand the device first (ControllerExpandVolume, NodeExpandVolume of the driver)",
        )


class DeviceTooLarge(errors.OutOfRange):
    """The device is larger than the caller's limit."""

    def __init__(self, device: str, size_bytes: int, wanted: volumes.CapacityRange) -> None:
        super().__init__(
            f"the volume on {device} cannot be kept within {wanted.limit_bytes} bytes",
            why=f"the device has {size_bytes} bytes already",
            hint="raise the limit: a filesystem fills its device",
        )


class UnbelievableSize(errors.RuntimeFailed):
    """A handler says that a filesystem fills what its device does not have."""

    def __init__(self, device: str, size_bytes: int, told_bytes: int) -> None:
        super().__init__(
            f"the runtime's answer about the filesystem on {device} is not usable",
            why=f"it says {told_bytes} bytes, and the device has {size_bytes}",
            hint="look at the handler's log; the guest may be broken or hostile",
        )


class RuntimeApi(runtime_pb2_grpc.RuntimeServicer):
    """Runtime, by target path."""

    def __init__(
        self,
        deferred: DeferredVolumes,
        handlers: Handlers,
        peers: HandlerPeers,
        stage: RuntimeStage,
        devices: Devices,
    ) -> None:
        self._deferred = deferred
        self._handlers = handlers
        self._peers = peers
        self._stage = stage
        self._devices = devices

    async def RuntimeGetVolumeStats(
        self, request: runtime_pb2.RuntimeGetVolumeStatsRequest, context: Context
    ) -> runtime_pb2.RuntimeGetVolumeStatsResponse:
        """Statistics from the kernel that has the volume mounted."""
        record = self._expect(request.volume_target_path)
        await self._check_claimed(record)
        handler = await self._handlers.owner(record.handler)
        stats = await self._peers.stats(handler, record.target, context.time_remaining())
        response = runtime_pb2.RuntimeGetVolumeStatsResponse(usage=crust_v1.usages_to_wire(stats))
        if stats.condition is not None:
            response.volume_condition.CopyFrom(crust_v1.condition_to_wire(stats.condition))
        return response

    async def RuntimeExpandVolume(
        self, request: runtime_pb2.RuntimeExpandVolumeRequest, context: Context
    ) -> runtime_pb2.RuntimeExpandVolumeResponse:
        """Grow the filesystem to its device. Without a sandbox the size is recorded, and the mount grows it."""
        record = self._expect(request.volume_target_path)
        wanted = crust_v1.capacity_range(request.capacity_range)
        size_bytes = await asyncio.to_thread(self._devices.size_bytes, record.device)
        if wanted.limit_bytes and size_bytes > wanted.limit_bytes:
            raise DeviceTooLarge(record.device, size_bytes, wanted)
        if size_bytes < wanted.required_bytes:
            raise DeviceTooSmall(record.device, size_bytes, wanted)
        if await self._is_claimed(record):
            handler = await self._handlers.owner(record.handler)
            filled_bytes = await self._peers.expand(
                handler,
                record.target,
                volumes.CapacityRange(size_bytes, wanted.limit_bytes),
                context.time_remaining(),
            )
            if not 0 < filled_bytes <= size_bytes:
                raise UnbelievableSize(record.device, size_bytes, filled_bytes)
        await self._stage.resized(record, size_bytes)
        return runtime_pb2.RuntimeExpandVolumeResponse(capacity_bytes=size_bytes)

    async def RuntimeStageVolume(
        self, request: runtime_pb2.RuntimeStageVolumeRequest, context: Context
    ) -> runtime_pb2.RuntimeStageVolumeResponse:
        """Hand a volume over for a driver that implements the KEP itself."""
        await self._stage.stage(request)
        return runtime_pb2.RuntimeStageVolumeResponse()

    async def RuntimeUnstageVolume(
        self, request: runtime_pb2.RuntimeUnstageVolumeRequest, context: Context
    ) -> runtime_pb2.RuntimeUnstageVolumeResponse:
        """Take it back."""
        target = volumes.TargetPath.parse(request.volume_target_path, role="volume_target_path")
        await self._stage.unstage(target)
        return runtime_pb2.RuntimeUnstageVolumeResponse()

    def _expect(self, text: str) -> Record:
        target = volumes.TargetPath.parse(text, role="volume_target_path")
        return self._deferred.expect(target.text)

    async def _is_claimed(self, record: Record) -> bool:
        entry = await asyncio.to_thread(self._deferred.store.read, record.target)
        return entry is not None and entry.live

    async def _check_claimed(self, record: Record) -> None:
        if not await self._is_claimed(record):
            raise NotInSandbox(record.target.text)
