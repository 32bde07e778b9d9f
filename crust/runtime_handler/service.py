"""RuntimeHandler on a socket of one's own: the proxy asks, the runtime answers in values.

A runtime implements `Handler`; decoding, encoding, status codes, logging and the socket's ownership are done here.
What changes something (expansion, freeze and thaw, limits) runs as an operation under the volume's target path: it
survives the proxy's deadline, a retry joins it, and leaving the block waits for it. The other calls change nothing
and are simply cancelled. The three kinds do not hinder one another: an expansion waits in the guest until a freeze
has ended, and must not keep away the thaw that ends it. A thaw waits for a freeze that is under way, so that a caller
that gave up waiting for the freeze ends it all the same.

A runtime that cannot freeze or limit leaves the feature out of its RegisterRequest: then the proxy refuses such calls
itself and never makes them. Called all the same, the runtime raises `FeatureNotOffered`.
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from crust import errors, operations, volumes
from crust.handoff import claims
from crust.rpc import crust_v1, server
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc


class FeatureNotOffered(errors.Unsupported):
    """A runtime does not have a feature; for runtimes to raise."""

    def __init__(self, feature: volumes.HandlerFeature) -> None:
        super().__init__(
            "the runtime cannot do that",
            why=f"it does not offer {feature.name}",
            hint="use a runtime whose features name it: `crust handlers`",
        )


@dataclass(frozen=True, slots=True)
class HeldVolume:
    """A volume that one of the runtime's sandboxes has."""

    target: volumes.TargetPath
    sandbox_id: volumes.SandboxId
    state: claims.State


class Handler(Protocol):
    """What a runtime can tell and do about its volumes; it raises errors of `crust.errors`.

    For a target path that no sandbox has: `errors.NotReady`.
    """

    async def get_stats(self, target: volumes.TargetPath) -> volumes.VolumeStats:
        """Usage in bytes and inodes, as the guest's kernel counts them, and the condition where it is known."""

    async def expand(self, target: volumes.TargetPath, capacity: volumes.CapacityRange) -> int:
        """Show the guest the device's size, grow the filesystem, and return the bytes it fills now. Idempotent."""

    async def health(self, target: volumes.TargetPath) -> volumes.VolumeCondition:
        """Whether something is wrong with the volume in the guest."""

    async def list_volumes(self) -> Sequence[HeldVolume]:
        """All volumes of all sandboxes."""

    async def freeze(self, target: volumes.TargetPath, thaw_after_s: int) -> None:
        """Flush the filesystem and hold its writers, for `thaw_after_s` at most, whoever dies. Idempotent.

        The time is kept in the guest. A repetition begins it anew.
        """

    async def thaw(self, target: volumes.TargetPath) -> bool:
        """Let the writers go on; whether they were held without a gap since the last `freeze`. Idempotent."""

    async def set_limits(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> None:
        """Limit what the guest does to the device, in place of the limits before. All or nothing; idempotent."""


@contextlib.asynccontextmanager
async def serving(
    socket_path: str, handler: Handler, *, lock_path: str = ""
) -> AsyncIterator[grpc.aio.Server]:
    """Serve `handler` on `socket_path` until the block is left; running expansions are finished first.

    Raises what `crust.rpc.server.serving` raises: the socket is in use, its path is too long.
    """
    running = operations.KeyedOperations()
    servicer = _Servicer(handler, running)

    def register(into: grpc.aio.Server) -> None:
        handlers_pb2_grpc.add_RuntimeHandlerServicer_to_server(servicer, into)

    async with server.serving(
        socket_path, register, name="runtime-handler", lock_path=lock_path
    ) as serving_now:
        try:
            yield serving_now
        finally:
            await running.drain()


_Context = grpc.aio.ServicerContext[Any, Any]


class _Servicer(handlers_pb2_grpc.RuntimeHandlerServicer):
    def __init__(self, handler: Handler, running: operations.KeyedOperations) -> None:
        self._handler = handler
        self._running = running
        self._stillness: weakref.WeakValueDictionary[volumes.TargetPath, asyncio.Lock]
        self._stillness = weakref.WeakValueDictionary()

    async def GetVolumeStats(
        self, request: handlers_pb2.GetVolumeStatsRequest, context: _Context
    ) -> handlers_pb2.GetVolumeStatsResponse:
        stats = await self._handler.get_stats(volumes.TargetPath.parse(request.target_path))
        response = handlers_pb2.GetVolumeStatsResponse(usage=crust_v1.usages_to_wire(stats))
        if stats.condition is not None:
            response.volume_condition.CopyFrom(crust_v1.condition_to_wire(stats.condition))
        return response

    async def ExpandVolume(
        self, request: handlers_pb2.ExpandVolumeRequest, context: _Context
    ) -> handlers_pb2.ExpandVolumeResponse:
        target = volumes.TargetPath.parse(request.target_path)
        capacity = crust_v1.capacity_range(request.capacity_range)
        size_bytes = await self._running.run(
            target, "ExpandVolume", capacity, lambda: self._handler.expand(target, capacity)
        )
        return handlers_pb2.ExpandVolumeResponse(capacity_bytes=size_bytes)

    async def GetVolumeHealth(
        self, request: handlers_pb2.GetVolumeHealthRequest, context: _Context
    ) -> handlers_pb2.GetVolumeHealthResponse:
        condition = await self._handler.health(volumes.TargetPath.parse(request.target_path))
        return handlers_pb2.GetVolumeHealthResponse(
            volume_condition=crust_v1.condition_to_wire(condition)
        )

    async def ListVolumes(
        self, request: handlers_pb2.ListVolumesRequest, context: _Context
    ) -> handlers_pb2.ListVolumesResponse:
        held = await self._handler.list_volumes()
        return handlers_pb2.ListVolumesResponse(entries=map(_entry, held))

    async def FreezeVolume(
        self, request: handlers_pb2.FreezeVolumeRequest, context: _Context
    ) -> handlers_pb2.FreezeVolumeResponse:
        target = volumes.TargetPath.parse(request.target_path)
        thaw_after_s = crust_v1.thaw_after_s(request.thaw_after_seconds)
        await self._running.run(
            ("freeze", target),
            "FreezeVolume",
            thaw_after_s,
            lambda: self._freeze(target, thaw_after_s),
        )
        return handlers_pb2.FreezeVolumeResponse()

    async def ThawVolume(
        self, request: handlers_pb2.ThawVolumeRequest, context: _Context
    ) -> handlers_pb2.ThawVolumeResponse:
        target = volumes.TargetPath.parse(request.target_path)
        was_frozen = await self._running.run(
            ("thaw", target), "ThawVolume", None, lambda: self._thaw(target)
        )
        return handlers_pb2.ThawVolumeResponse(was_frozen=was_frozen)

    async def SetVolumeLimits(
        self, request: handlers_pb2.SetVolumeLimitsRequest, context: _Context
    ) -> handlers_pb2.SetVolumeLimitsResponse:
        target = volumes.TargetPath.parse(request.target_path)
        limits = crust_v1.io_limits(request.limits)
        await self._running.run(
            ("limits", target),
            "SetVolumeLimits",
            limits,
            lambda: self._handler.set_limits(target, limits),
        )
        return handlers_pb2.SetVolumeLimitsResponse()

    async def _freeze(self, target: volumes.TargetPath, thaw_after_s: int) -> None:
        async with self._turn(target):
            await self._handler.freeze(target, thaw_after_s)

    async def _thaw(self, target: volumes.TargetPath) -> bool:
        async with self._turn(target):
            return await self._handler.thaw(target)

    def _turn(self, target: volumes.TargetPath) -> asyncio.Lock:
        """Freeze and thaw of one volume reach the runtime in the order in which they came."""
        return self._stillness.setdefault(target, asyncio.Lock())


def _entry(held: HeldVolume) -> handlers_pb2.ListVolumesResponse.Entry:
    return handlers_pb2.ListVolumesResponse.Entry(
        target_path=held.target.text, sandbox_id=held.sandbox_id, state=held.state.value
    )
