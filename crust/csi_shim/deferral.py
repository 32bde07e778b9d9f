"""Answers the calls whose flag says "deferred", for a driver in this process or behind a socket.

The shim calls the inner driver with the flag set, and the driver must answer with metadata. If it mounts instead, the
shim unpublishes at once and reports an error: a deferred publish must never leave a mount on the host. An inline
volume alone stays mounted until the CO unpublishes it: its unpublish deletes it, with the data of before a reboot.
"""

import asyncio
from typing import Protocol

from crust.core import deferral_keys, errors, volumes
from crust.csi_shim.runtime_client import RuntimeClient
from crust.rpc import outcome
from crust.rpc.call import Call
from crust.rpc.driver_facts import DeferralUnsupported
from crust.rpc.messages import csi, limits
from crust.wire.csi.v1 import csi_pb2

UNDO_TIMEOUT_S = 30.0
"""For undoing a publish: of the caller's time nothing may be left, and the mount must go."""


class InnerNode(Protocol):
    """The Node service of the wrapped driver."""

    async def publish(
        self, request: csi_pb2.NodePublishVolumeRequest, call: Call
    ) -> csi_pb2.NodePublishVolumeResponse:
        """NodePublishVolume."""

    async def unpublish(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, call: Call, timeout_s: float
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """NodeUnpublishVolume, within a deadline of its own."""

    async def expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, call: Call
    ) -> csi_pb2.NodeExpandVolumeResponse:
        """NodeExpandVolume."""

    async def defers(self, call: Call) -> bool:
        """Whether it advertises DEFER_FS_OPS now, to a caller that opts in to deferral."""


class Deferral:
    """Answers the flagged calls. Constructed with the driver and a client of the proxy's Runtime API."""

    def __init__(self, inner: InnerNode, runtime: RuntimeClient, *, report_condition: bool) -> None:
        self._inner = inner
        self._runtime = runtime
        self._tell_condition = report_condition
        self._undos: set[asyncio.Task[outcome.Residue]] = set()

    async def publish(
        self, request: csi_pb2.NodePublishVolumeRequest, call: Call
    ) -> csi_pb2.NodePublishVolumeResponse:
        """Return deferred-mount metadata.

        Raises `DeferralUnsupported`, `MountedInsteadOfDeferred`, `csi.InvalidDeferredMount`.
        """
        if not await self._inner.defers(call):
            raise DeferralUnsupported()
        response = await self._inner.publish(request, call)
        try:
            if not response.HasField("deferred_mount"):
                raise errors.RuntimeFailed.named(
                    "MountedInsteadOfDeferred",
                    f"volume {request.volume_id[:128]} was not deferred",
                    why="the driver answered a deferred publish without deferred_mount",
                    hint="this is a bug in the driver; do not defer its volumes until it is fixed",
                )
            csi.deferred_mount(response.deferred_mount)
        except errors.CrustError as error:
            undo = asyncio.create_task(self._undo(request, call))
            self._undos.add(undo)
            undo.add_done_callback(self._undos.discard)
            residue = await asyncio.shield(undo)  # whether or not the caller still waits
            raise outcome.answer("NodePublishVolume", error, residue) from error
        return response

    async def stats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        """Statistics from the kernel that has the volume mounted."""
        limits.volume_id_of_any_driver(request.volume_id)
        target = volumes.TargetPath.parse(request.volume_path, role="volume_path")
        response = csi.stats_to_wire(await self._runtime.stats(target.text))
        if not self._tell_condition:
            response.ClearField("volume_condition")
        return response

    async def expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, call: Call
    ) -> csi_pb2.NodeExpandVolumeResponse:
        """Let the driver grow the device, then the runtime the filesystem. Idempotent."""
        target = volumes.TargetPath.parse(request.volume_path, role="volume_path")
        wanted = csi.capacity_range(request.capacity_range)
        grown = await self._inner.expand(request, call)
        wanted = volumes.CapacityRange(
            max(wanted.required_bytes, grown.capacity_bytes), wanted.limit_bytes
        )
        capacity_bytes = await self._runtime.expand(target.text, wanted, call.time_remaining())
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=capacity_bytes)

    async def _undo(self, request: csi_pb2.NodePublishVolumeRequest, call: Call) -> outcome.Residue:
        if deferral_keys.is_inline(request.volume_context, request.volume_id):
            return outcome.Residue.UNKNOWN
        undo = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=request.volume_id, target_path=request.target_path
        )
        try:
            await self._inner.unpublish(undo, call, UNDO_TIMEOUT_S)
        except (errors.CrustError, TimeoutError):  # report the error of the publish, not this one
            return outcome.Residue.UNKNOWN
        return outcome.Residue.NONE
