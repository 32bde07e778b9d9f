"""A driver of KEP-2857 as it was proposed: it calls the service Runtime itself, and knows nothing of crust.

It advertises no deferral and returns no deferred_mount. Its own plan decides what is deferred: every volume here.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import runtime_pb2, runtime_pb2_grpc, types_pb2
from tests.support.drivers.fake_driver import Context, Failure, FakeDriver


class KepDriver(FakeDriver):
    """Calls the Runtime API at `runtime_socket`."""

    def __init__(self, runtime_socket: str, *, defers: bool = False) -> None:
        super().__init__(defers=defers)
        self._socket = runtime_socket
        self.device = "/dev/kep0"
        self.after_stage: Callable[[], Awaitable[None]] = _nothing
        self.fails_after_stage: Failure | None = None
        self.unstages = True

    async def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Context
    ) -> csi_pb2.NodePublishVolumeResponse:
        await self._enter("NodePublishVolume", request, context)
        staged = runtime_pb2.RuntimeStageVolumeRequest(
            volume_type=types_pb2.VolumeType(type=types_pb2.VolumeType.BLOCK),
            volume_target_path=request.target_path,
            volume_backing_path=self.device,
            fs_type=request.volume_capability.mount.fs_type,
            mount_flags=request.volume_capability.mount.mount_flags,
        )
        await self._ask("RuntimeStageVolume", staged, context)
        await self.after_stage()
        await self._fail(self.fails_after_stage, context)
        await self._leave("NodePublishVolume", context)
        return csi_pb2.NodePublishVolumeResponse()

    async def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: Context
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        await self._enter("NodeUnpublishVolume", request, context)
        if self.unstages:
            asked = runtime_pb2.RuntimeUnstageVolumeRequest(volume_target_path=request.target_path)
            await self._ask("RuntimeUnstageVolume", asked, context)
        await self._leave("NodeUnpublishVolume", context)
        return csi_pb2.NodeUnpublishVolumeResponse()

    async def NodeGetVolumeStats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, context: Context
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        await self._enter("NodeGetVolumeStats", request, context)
        asked = runtime_pb2.RuntimeGetVolumeStatsRequest(volume_target_path=request.volume_path)
        answer = await self._ask("RuntimeGetVolumeStats", asked, context)
        usage = [
            csi_pb2.VolumeUsage(unit=csi_pb2.VolumeUsage.BYTES, total=each.total, used=each.used)
            for each in answer.usage
            if each.unit == types_pb2.VolumeUsage.BYTES
        ]
        return csi_pb2.NodeGetVolumeStatsResponse(usage=usage)

    async def NodeExpandVolume(
        self, request: csi_pb2.NodeExpandVolumeRequest, context: Context
    ) -> csi_pb2.NodeExpandVolumeResponse:
        await self._enter("NodeExpandVolume", request, context)
        asked = runtime_pb2.RuntimeExpandVolumeRequest(volume_target_path=request.volume_path)
        asked.capacity_range.required_bytes = request.capacity_range.required_bytes
        answer = await self._ask("RuntimeExpandVolume", asked, context)
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=answer.capacity_bytes)

    async def _ask(self, method: str, request: Any, context: Context) -> Any:
        async with channel.connect(self._socket) as connected:
            try:
                return await getattr(runtime_pb2_grpc.RuntimeStub(connected), method)(
                    request, timeout=10
                )
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")


async def _nothing() -> None:
    pass
