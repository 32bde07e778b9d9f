"""The runtime handlers' own sockets, called by the proxy.

A channel is kept while its handler is registered. A handler that vanishes in the middle of a call is
`PeerUnavailable`, and so is one that does not answer in time: the caller retries, the volume stays as it is.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc.aio

from crust import errors, volumes
from crust.proxy.handlers import Handler
from crust.rpc import channel, crust_v1, status
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc

Answer = TypeVar("Answer")

STATS_TIMEOUT_S = 9.0
EXPAND_TIMEOUT_S = 95.0
"""A little below what the shim waits, so that our sentence arrives and not its deadline."""

FREEZE_TIMEOUT_S = 55.0
"""A freeze flushes first, and a guest may have much to write. What it has frozen thaws by itself."""

THAW_TIMEOUT_S = 60.0
"""A thaw waits for a freeze that is still under way."""

LIMITS_TIMEOUT_S = 25.0


class HandlerNotResponding(errors.PeerUnavailable):
    """The handler was asked and did not answer."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"runtime handler {name!r} did not answer",
            why=why,
            hint="look at the handler's log on this node; running sandboxes are not affected",
        )


class VolumeUnknownToHandler(errors.NotReady):
    """A sandbox has the volume, and its handler says that it knows nothing of it."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"runtime handler {name!r} does not have the volume that its sandbox holds",
            why=why,
            hint="look at the handler's log; stop the sandbox if the handler has lost it",
        )


class HandlerPeers:
    """Calls handlers by their registration."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def stats(
        self, handler: Handler, target: volumes.TargetPath, timeout_s: float | None
    ) -> volumes.VolumeStats:
        """Statistics; raises the handler's error, `HandlerNotResponding` or `crust_v1.ImplausibleStats`."""
        request = handlers_pb2.GetVolumeStatsRequest(target_path=target.text)
        call = self._stub(handler).GetVolumeStats(
            request, timeout=_shorter(timeout_s, STATS_TIMEOUT_S)
        )
        answer = await _answer(handler, call)
        condition = answer.volume_condition if answer.HasField("volume_condition") else None
        return crust_v1.stats(answer.usage, condition)

    async def expand(
        self,
        handler: Handler,
        target: volumes.TargetPath,
        capacity: volumes.CapacityRange,
        timeout_s: float | None,
    ) -> int:
        """Grow the filesystem; returns the bytes that it fills now. Raises as `stats` does."""
        request = handlers_pb2.ExpandVolumeRequest(
            target_path=target.text, capacity_range=crust_v1.capacity_range_to_wire(capacity)
        )
        call = self._stub(handler).ExpandVolume(
            request, timeout=_shorter(timeout_s, EXPAND_TIMEOUT_S)
        )
        return (await _answer(handler, call)).capacity_bytes

    async def freeze(
        self,
        handler: Handler,
        target: volumes.TargetPath,
        thaw_after_s: int,
        timeout_s: float | None,
    ) -> None:
        """Hold the filesystem still, for `thaw_after_s` at most. Raises as `stats` does."""
        request = handlers_pb2.FreezeVolumeRequest(
            target_path=target.text, thaw_after_seconds=thaw_after_s
        )
        await _answer(
            handler,
            self._stub(handler).FreezeVolume(
                request, timeout=_shorter(timeout_s, FREEZE_TIMEOUT_S)
            ),
        )

    async def thaw(
        self, handler: Handler, target: volumes.TargetPath, timeout_s: float | None
    ) -> bool:
        """Let the writers go on; returns whether they were held all the time. Raises as `stats` does."""
        request = handlers_pb2.ThawVolumeRequest(target_path=target.text)
        call = self._stub(handler).ThawVolume(request, timeout=_shorter(timeout_s, THAW_TIMEOUT_S))
        return (await _answer(handler, call)).was_frozen

    async def set_limits(
        self, handler: Handler, target: volumes.TargetPath, limits: volumes.IoLimits
    ) -> None:
        """Replace the limits of the sandbox's device. Raises as `stats` does."""
        request = handlers_pb2.SetVolumeLimitsRequest(
            target_path=target.text, limits=crust_v1.io_limits_to_wire(limits)
        )
        await _answer(
            handler, self._stub(handler).SetVolumeLimits(request, timeout=LIMITS_TIMEOUT_S)
        )

    async def drop(self, handler: Handler) -> None:
        """Close the channel of a handler that is gone."""
        gone = self._channels.pop(handler.endpoint, None)
        if gone is not None:
            await gone.close()

    async def close(self) -> None:
        """Close every channel."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(each.close() for each in channels))

    def _stub(self, handler: Handler) -> "handlers_pb2_grpc.RuntimeHandlerAsyncStub":
        if handler.endpoint not in self._channels:
            self._channels[handler.endpoint] = channel.connect(handler.endpoint)
        return handlers_pb2_grpc.RuntimeHandlerStub(self._channels[handler.endpoint])


async def _answer(handler: Handler, call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except grpc.aio.AioRpcError as err:
        raise _error(handler, err) from err
    except asyncio.CancelledError as err:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # not we were cancelled but the call, by `drop`: its handler's lease ended in the middle of it
        raise HandlerNotResponding(handler.name, "it went away in the middle of the call") from err


def _error(handler: Handler, err: grpc.aio.AioRpcError) -> errors.CrustError:
    away = (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    )
    if err.code() in away and not status.name_in(err.trailing_metadata()):
        return HandlerNotResponding(handler.name, err.details() or err.code().name)
    if err.code() is grpc.StatusCode.NOT_FOUND:
        # passed on as it is it would say that the volume is not deferred, or not there at all
        return VolumeUnknownToHandler(handler.name, err.details() or "")
    return status.to_error(err)


def _shorter(one_s: float | None, other_s: float) -> float:
    return other_s if one_s is None else min(one_s, other_s)
