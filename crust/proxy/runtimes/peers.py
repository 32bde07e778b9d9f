"""The calls that the proxy makes to the handlers' own sockets.

A port is kept while its handler is registered. A handler that disappears during a call, or does not answer in
time, is `PeerUnavailable`: the caller retries, the volume stays as it is.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from crust.core import errors, volumes
from crust.proxy.runtimes.handlers import Handler
from crust.rpc import channel, port, status
from crust.rpc.messages import crust_v1
from crust.rpc.port import SocketPort, volume_metadata
from crust.rpc.status import PeerStatus
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc

Answer = TypeVar("Answer")

STATS_TIMEOUT_S = 9.0
EXPAND_TIMEOUT_S = 95.0
"""A little below the shim's timeout, so that the shim gets this error and not its own deadline."""

FREEZE_TIMEOUT_S = 55.0
"""A freeze flushes first, and a guest may have much to write. The guest thaws by itself in any case."""

THAW_TIMEOUT_S = 60.0
"""A thaw waits for a running freeze."""

LIMITS_TIMEOUT_S = 25.0


class HandlerNotResponding(errors.PeerUnavailable):
    """The runtime handler did not answer a call."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"runtime handler {name!r} did not answer",
            why=why,
            hint="read the handler's log on this node; running sandboxes are not affected",
        )


class HandlerPeers:
    """Calls registered handlers."""

    def __init__(self) -> None:
        self._ports: dict[tuple[volumes.HandlerName, str], SocketPort] = {}
        """By name too: handlers may share an endpoint, and each one's port ends with its own session."""

    async def stats(
        self, handler: Handler, target: volumes.TargetPath, timeout_s: float | None
    ) -> volumes.VolumeStats:
        """Statistics; raises the handler's error, `HandlerNotResponding` or `crust_v1.ImplausibleStats`."""
        request = handlers_pb2.GetVolumeStatsRequest(target_path=target.text)
        call = self._stub(handler).GetVolumeStats(
            request, timeout=_shorter(timeout_s, STATS_TIMEOUT_S), metadata=volume_metadata()
        )
        answer = await _answer(handler, call)
        condition = answer.volume_condition if answer.HasField("volume_condition") else None
        return crust_v1.stats(answer.usage, condition)

    async def health(
        self, handler: Handler, target: volumes.TargetPath, timeout_s: float | None
    ) -> volumes.VolumeCondition:
        """The volume's health in the guest. Raises as `stats` does."""
        request = handlers_pb2.GetVolumeHealthRequest(target_path=target.text)
        call = self._stub(handler).GetVolumeHealth(
            request, timeout=_shorter(timeout_s, STATS_TIMEOUT_S), metadata=volume_metadata()
        )
        return crust_v1.condition((await _answer(handler, call)).volume_condition)

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
            request, timeout=_shorter(timeout_s, EXPAND_TIMEOUT_S), metadata=volume_metadata()
        )
        return (await _answer(handler, call)).capacity_bytes

    async def freeze(
        self,
        handler: Handler,
        target: volumes.TargetPath,
        thaw_after_s: int,
        timeout_s: float | None,
    ) -> None:
        """Freeze the filesystem for at most `thaw_after_s`. Raises as `stats` does."""
        request = handlers_pb2.FreezeVolumeRequest(
            target_path=target.text, thaw_after_seconds=thaw_after_s
        )
        await _answer(
            handler,
            self._stub(handler).FreezeVolume(
                request,
                timeout=_shorter(timeout_s, FREEZE_TIMEOUT_S),
                metadata=volume_metadata(),
            ),
        )

    async def thaw(
        self, handler: Handler, target: volumes.TargetPath, timeout_s: float | None
    ) -> bool:
        """Thaw; return whether the filesystem was frozen all the time. Raises as `stats` does."""
        request = handlers_pb2.ThawVolumeRequest(target_path=target.text)
        call = self._stub(handler).ThawVolume(
            request, timeout=_shorter(timeout_s, THAW_TIMEOUT_S), metadata=volume_metadata()
        )
        return (await _answer(handler, call)).was_frozen

    async def set_limits(
        self, handler: Handler, target: volumes.TargetPath, limits: volumes.IoLimits
    ) -> None:
        """Replace the I/O limits of the sandbox's device. Raises as `stats` does."""
        request = handlers_pb2.SetVolumeLimitsRequest(
            target_path=target.text, limits=crust_v1.io_limits_to_wire(limits)
        )
        await _answer(
            handler,
            self._stub(handler).SetVolumeLimits(
                request, timeout=LIMITS_TIMEOUT_S, metadata=volume_metadata()
            ),
        )

    async def drop(self, handler: Handler) -> None:
        """Close the port to a handler whose session has ended."""
        gone = self._ports.pop((handler.name, handler.endpoint), None)
        if gone is not None:
            await gone.aclose()

    async def close(self) -> None:
        """Close every port."""
        ports, self._ports = list(self._ports.values()), {}
        await asyncio.gather(*(each.aclose() for each in ports))

    def _stub(self, handler: Handler) -> "handlers_pb2_grpc.RuntimeHandlerAsyncStub":
        key = (handler.name, handler.endpoint)
        if key not in self._ports:
            self._ports[key] = SocketPort(
                handler.endpoint, answer_max_bytes=channel.HANDLER_ANSWER_MAX_BYTES
            )
        return port.stub(handlers_pb2_grpc.RuntimeHandlerStub, self._ports[key])


async def _answer(handler: Handler, call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except PeerStatus as refusal:
        raise _error(handler, refusal) from refusal
    except asyncio.CancelledError as err:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # not this task was cancelled but the call, by `drop`: the handler's session ended during the call
        raise HandlerNotResponding(handler.name, "it disconnected during the call") from err


def _error(handler: Handler, refusal: PeerStatus) -> errors.CrustError:
    away = (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    )
    if refusal.code in away and not status.name_in(refusal.trailing):
        return HandlerNotResponding(handler.name, refusal.why or refusal.what)
    if refusal.code is grpc.StatusCode.NOT_FOUND:
        # passed on unchanged, it would mean that the volume is not deferred or does not exist
        return errors.NotReady.named(
            "VolumeUnknownToHandler",
            f"runtime handler {handler.name!r} does not know the volume that its sandbox has",
            why=refusal.what,
            hint="read the handler's log; stop the sandbox if the handler has lost it",
        )
    return status.to_error(refusal)


def _shorter(one_s: float | None, other_s: float) -> float:
    return other_s if one_s is None else min(one_s, other_s)
