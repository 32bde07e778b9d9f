"""Serves RuntimeHandler on the handler's own socket: the proxy calls it, the runtime answers with core types.

A runtime extends `Handler`; this module decodes, encodes, maps errors to status codes, logs, and owns the socket.
Calls that change something (expansion, freeze and thaw, limits) run as operations keyed by the volume's target path:
they survive the proxy's deadline, a retry joins them, and the end of the block waits for them. The other calls change
nothing, so their caller may cancel them. The three kinds of operations do not exclude one another: an expansion waits
in the guest until a freeze has ended, and must not block the thaw that ends it. A thaw waits for a running freeze, so
that a caller that gave up waiting for the freeze can still end it.
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import TypeVar

import grpc.aio

from crust.core import errors, operations, volumes
from crust.host.process.workers import Workers
from crust.rpc.call import Call
from crust.rpc.messages import crust_v1, csi
from crust.rpc.serving import server
from crust.rpc.serving.service import Service, methods_of
from crust.wire.v1 import handlers_pb2, types_pb2

__all__ = ["FeatureNotOffered", "Handler", "serving"]

T = TypeVar("T")
_SERVICE = handlers_pb2.DESCRIPTOR.services_by_name["RuntimeHandler"]


class FeatureNotOffered(errors.Unsupported):
    def __init__(self, feature: volumes.HandlerFeature) -> None:
        super().__init__(
            "the runtime does not support this call", why=f"it does not offer {feature.name}"
        )


class Handler:
    """The calls that a runtime answers: it overrides the methods of the features in its RegisterRequest.

    The proxy makes no other calls, and to those of another feature it raises `FeatureNotOffered`.
    They raise errors of `crust.core.errors`; for a target path that no sandbox has claimed, `errors.NotReady`.
    """

    async def problems(self) -> Collection[str]:
        """What is wrong with the runtime, for `crust status`: a sentence each, as `errors.CrustError.shown`."""
        return ()

    async def stats(self, target: volumes.TargetPath) -> volumes.VolumeStats:
        """Usage in bytes and inodes, as the guest's kernel counts them, and the condition if it is known."""
        raise FeatureNotOffered(volumes.HandlerFeature.STATS)

    async def expand(self, target: volumes.TargetPath, capacity: volumes.CapacityRange) -> int:
        """Resize the guest's disk, grow the filesystem, and return the bytes that it fills now. Idempotent."""
        raise FeatureNotOffered(volumes.HandlerFeature.ONLINE_EXPAND)

    async def health(self, target: volumes.TargetPath) -> volumes.VolumeCondition:
        """The volume's health in the guest."""
        raise FeatureNotOffered(volumes.HandlerFeature.HEALTH)

    async def freeze(self, target: volumes.TargetPath, thaw_after_s: int) -> None:
        """Flush and freeze the filesystem for at most `thaw_after_s`, even if other processes die. Idempotent.

        The guest keeps the time. A repeated call restarts it.
        """
        raise FeatureNotOffered(volumes.HandlerFeature.FREEZE)

    async def thaw(self, target: volumes.TargetPath) -> bool:
        """Thaw; return whether the filesystem was frozen without a gap since the last `freeze`. Idempotent."""
        raise FeatureNotOffered(volumes.HandlerFeature.FREEZE)

    async def set_limits(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> None:
        """Replace the device's I/O limits. All or nothing; idempotent."""
        raise FeatureNotOffered(volumes.HandlerFeature.IO_LIMITS)


@contextlib.asynccontextmanager
async def serving(
    socket_path: str, handler: Handler, *, lock_path: str = ""
) -> AsyncIterator[grpc.aio.Server]:
    """Serve `handler` on `socket_path` while the block runs; at its end wait for running operations.

    Raises as `crust.rpc.serving.server.serving`: the socket is in use, its path is too long.
    """
    running = operations.KeyedOperations(Workers("the runtime handler"))
    service = Service("runtime-handler", methods_of(_Servicer(handler, running), _SERVICE))
    async with server.serving(socket_path, service, lock_path=lock_path) as serving_now:
        try:
            yield serving_now
        finally:
            await running.drain()


class _Servicer:
    def __init__(self, handler: Handler, running: operations.KeyedOperations) -> None:
        self._handler = handler
        self._running = running
        self._freeze_locks = weakref.WeakValueDictionary[volumes.TargetPath, asyncio.Lock]()

    async def GetProblems(
        self, request: handlers_pb2.GetProblemsRequest, call: Call
    ) -> handlers_pb2.GetProblemsResponse:
        return handlers_pb2.GetProblemsResponse(problems=await self._handler.problems())

    async def GetVolumeStats(
        self, request: handlers_pb2.GetVolumeStatsRequest, call: Call
    ) -> handlers_pb2.GetVolumeStatsResponse:
        stats = await self._handler.stats(volumes.TargetPath.parse(request.target_path))
        return handlers_pb2.GetVolumeStatsResponse(
            usage=crust_v1.usages_to_wire(stats, types_pb2.VolumeUsage),
            volume_condition=crust_v1.condition_to_wire(stats.condition),
        )

    async def ExpandVolume(
        self, request: handlers_pb2.ExpandVolumeRequest, call: Call
    ) -> handlers_pb2.ExpandVolumeResponse:
        target = volumes.TargetPath.parse(request.target_path)
        capacity = csi.capacity_range(request.capacity_range)
        size_bytes = await self._running.run(
            target, "ExpandVolume", capacity, lambda: self._handler.expand(target, capacity)
        )
        return handlers_pb2.ExpandVolumeResponse(capacity_bytes=size_bytes)

    async def GetVolumeHealth(
        self, request: handlers_pb2.GetVolumeHealthRequest, call: Call
    ) -> handlers_pb2.GetVolumeHealthResponse:
        condition = await self._handler.health(volumes.TargetPath.parse(request.target_path))
        return handlers_pb2.GetVolumeHealthResponse(
            volume_condition=crust_v1.condition_to_wire(condition)
        )

    async def FreezeVolume(
        self, request: handlers_pb2.FreezeVolumeRequest, call: Call
    ) -> handlers_pb2.FreezeVolumeResponse:
        target = volumes.TargetPath.parse(request.target_path)
        thaw_after_s = crust_v1.thaw_after_s(request.thaw_after_seconds)
        await self._running.run(
            ("freeze", target),
            "FreezeVolume",
            thaw_after_s,
            lambda: self._in_order(target, lambda: self._handler.freeze(target, thaw_after_s)),
        )
        return handlers_pb2.FreezeVolumeResponse()

    async def ThawVolume(
        self, request: handlers_pb2.ThawVolumeRequest, call: Call
    ) -> handlers_pb2.ThawVolumeResponse:
        target = volumes.TargetPath.parse(request.target_path)
        was_frozen = await self._running.run(
            ("thaw", target),
            "ThawVolume",
            None,
            lambda: self._in_order(target, lambda: self._handler.thaw(target)),
        )
        return handlers_pb2.ThawVolumeResponse(was_frozen=was_frozen)

    async def SetVolumeLimits(
        self, request: handlers_pb2.SetVolumeLimitsRequest, call: Call
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

    async def _in_order(self, target: volumes.TargetPath, work: Callable[[], Awaitable[T]]) -> T:
        """Freezes and thaws of one volume keep the order of their arrival."""
        async with self._freeze_locks.setdefault(target, asyncio.Lock()):
            return await work()
