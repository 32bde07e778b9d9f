"""Answers the calls whose flag says "deferred", for a driver in this process or behind a socket.

The shim calls the inner driver with the flag set, and the driver must answer with metadata. If it mounts instead, the
shim unpublishes at once and reports an error: a deferred publish must never leave a mount on the host.
"""

from typing import Any, Protocol

import grpc.aio

from crust import errors, volumes
from crust.csi_shim.runtime_client import RuntimeClient
from crust.rpc import csi, limits, outcome
from crust.wire.csi.v1 import csi_pb2

Context = grpc.aio.ServicerContext[Any, Any]


class InnerNode(Protocol):
    """The Node service of the wrapped driver."""

    async def publish(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Context
    ) -> csi_pb2.NodePublishVolumeResponse:
        """NodePublishVolume."""

    async def unpublish(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: Context
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """NodeUnpublishVolume."""

    async def expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, context: Context
    ) -> csi_pb2.NodeExpandVolumeResponse:
        """NodeExpandVolume."""

    async def capabilities(self, context: Context) -> csi_pb2.NodeGetCapabilitiesResponse:
        """NodeGetCapabilities, called with the metadata that opts in to deferral."""


class DeferralUnsupported(errors.Unsupported):
    """The inner driver does not support deferral."""

    def __init__(self) -> None:
        super().__init__(
            "the mount cannot be deferred",
            why="the driver does not advertise DEFER_FS_OPS",
            hint="use a driver that supports deferral, or remove crust.dev/defer from the StorageClass",
        )


class MountedInsteadOfDeferred(errors.RuntimeFailed):
    """The inner driver advertises deferral, but mounted a volume instead of deferring it."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"volume {volume_id[:128]} was not deferred",
            why="the driver answered a deferred publish without deferred_mount; the shim called unpublish",
            hint="this is a bug in the driver; do not defer its volumes until it is fixed",
        )


class Deferral:
    """Answers the flagged calls. Constructed with the driver and a client of the proxy's Runtime API."""

    def __init__(self, inner: InnerNode, runtime: RuntimeClient, *, report_condition: bool) -> None:
        self._inner = inner
        self._runtime = runtime
        self._tell_condition = report_condition
        self._inner_defers = False

    async def publish(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Context
    ) -> csi_pb2.NodePublishVolumeResponse:
        """Return deferred-mount metadata.

        Raises `DeferralUnsupported`, `MountedInsteadOfDeferred`, `csi.InvalidDeferredMount`.
        """
        await self._check_inner(context)
        response = await self._inner.publish(request, context)
        try:
            if not response.HasField("deferred_mount"):
                raise MountedInsteadOfDeferred(request.volume_id)
            csi.deferred_mount(response.deferred_mount)
        except errors.CrustError as error:
            residue = await self._undo(request, context)
            raise outcome.answer("NodePublishVolume", error, residue) from error
        return response

    async def stats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        """Statistics from the kernel that has the volume mounted."""
        limits.volume_id(request.volume_id)
        target = volumes.TargetPath.parse(request.volume_path, role="volume_path")
        response = csi.stats_to_wire(await self._runtime.stats(target.text))
        if not self._tell_condition:
            response.ClearField("volume_condition")
        return response

    async def expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, context: Context
    ) -> csi_pb2.NodeExpandVolumeResponse:
        """Let the driver grow the device, then the runtime the filesystem. Idempotent."""
        target = volumes.TargetPath.parse(request.volume_path, role="volume_path")
        wanted = csi.capacity_range(request.capacity_range)
        grown = await self._inner.expand(request, context)
        wanted = volumes.CapacityRange(
            max(wanted.required_bytes, grown.capacity_bytes), wanted.limit_bytes
        )
        capacity_bytes = await self._runtime.expand(target.text, wanted, context.time_remaining())
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=capacity_bytes)

    async def _check_inner(self, context: Context) -> None:
        if self._inner_defers:
            return
        answer = await self._inner.capabilities(context)
        numbers = {each.rpc.type for each in answer.capabilities}
        if csi_pb2.NodeServiceCapability.RPC.DEFER_FS_OPS not in numbers:
            raise DeferralUnsupported()
        self._inner_defers = True

    async def _undo(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Context
    ) -> outcome.Residue:
        undo = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=request.volume_id, target_path=request.target_path
        )
        try:
            await self._inner.unpublish(undo, context)
        except (
            grpc.aio.AioRpcError,
            errors.CrustError,
        ):  # report the error of the publish, not this one
            return outcome.Residue.UNKNOWN
        return outcome.Residue.NONE
