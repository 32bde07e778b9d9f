"""The calls that the proxy makes to the runtime handlers' own sockets. Each raises the handler's error.

A handler that disappears or is silent for too long is `HandlerNotResponding`: the caller retries, and
the volume stays as it is.
"""

import asyncio
from typing import TypeVar

import grpc

from crust.core import errors, volumes
from crust.core.printable import printable
from crust.proxy.handlers import RegisteredHandler
from crust.rpc import status
from crust.rpc.call import volume_metadata
from crust.rpc.messages import crust_v1
from crust.rpc.status import PeerStatus
from crust.wire.v1 import handlers_pb2

Request = TypeVar("Request")
Answer = TypeVar("Answer")

STATS_TIMEOUT_S = 9.0
EXPAND_TIMEOUT_S = 95.0
"""A little below the shim's timeout, so that the shim gets this error and not its own deadline."""

FREEZE_TIMEOUT_S = 55.0
"""A freeze flushes first, and a guest may have much to write. The guest thaws by itself in any case."""

THAW_TIMEOUT_S = 60.0
"""A thaw waits for a running freeze."""

LIMITS_TIMEOUT_S = 25.0

PROBLEMS_TIMEOUT_S = 2.0
"""An operator waits for the answers of all handlers."""

_SHOWN_MAX = 4096
_CODES = grpc.StatusCode
_AWAY = (_CODES.UNAVAILABLE, _CODES.DEADLINE_EXCEEDED, _CODES.CANCELLED)


class HandlerNotResponding(errors.PeerUnavailable):
    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"runtime handler {name!r} did not answer", why=why)


async def problems(handler: RegisteredHandler) -> str:
    """What is wrong with the handler, for operators; empty if nothing is, or it does not serve the call."""
    request, method = handlers_pb2.GetProblemsRequest(), handler.stub.GetProblems
    try:
        answer = await _call(handler, method, request, PROBLEMS_TIMEOUT_S, None)
    except errors.Unsupported:
        return ""
    except errors.CrustError as error:
        return error.shown()
    return printable("; ".join(answer.problems)[:_SHOWN_MAX])


async def stats(
    handler: RegisteredHandler, target: volumes.TargetPath, left_s: float | None
) -> volumes.VolumeStats:
    """Statistics; raises `crust_v1.ImplausibleStats` too."""
    request = handlers_pb2.GetVolumeStatsRequest(target_path=target.text)
    answer = await _call(handler, handler.stub.GetVolumeStats, request, STATS_TIMEOUT_S, left_s)
    condition = answer.volume_condition if answer.HasField("volume_condition") else None
    return crust_v1.stats(answer.usage, condition)


async def health(
    handler: RegisteredHandler, target: volumes.TargetPath, left_s: float | None
) -> volumes.VolumeCondition:
    request = handlers_pb2.GetVolumeHealthRequest(target_path=target.text)
    answer = await _call(handler, handler.stub.GetVolumeHealth, request, STATS_TIMEOUT_S, left_s)
    return crust_v1.condition(answer.volume_condition)


async def expand(
    handler: RegisteredHandler,
    target: volumes.TargetPath,
    capacity: volumes.CapacityRange,
    left_s: float | None = None,
) -> int:
    """Grow the filesystem; returns the bytes that it fills now."""
    wire = crust_v1.capacity_range_to_wire(capacity)
    request = handlers_pb2.ExpandVolumeRequest(target_path=target.text, capacity_range=wire)
    answer = await _call(handler, handler.stub.ExpandVolume, request, EXPAND_TIMEOUT_S, left_s)
    return answer.capacity_bytes


async def freeze(
    handler: RegisteredHandler, target: volumes.TargetPath, thaw_after_s: int, left_s: float | None
) -> None:
    """Freeze the filesystem for at most `thaw_after_s`."""
    request = handlers_pb2.FreezeVolumeRequest(
        target_path=target.text, thaw_after_seconds=thaw_after_s
    )
    await _call(handler, handler.stub.FreezeVolume, request, FREEZE_TIMEOUT_S, left_s)


async def thaw(
    handler: RegisteredHandler, target: volumes.TargetPath, left_s: float | None
) -> bool:
    """Thaw; return whether the filesystem was frozen all the time."""
    request = handlers_pb2.ThawVolumeRequest(target_path=target.text)
    answer = await _call(handler, handler.stub.ThawVolume, request, THAW_TIMEOUT_S, left_s)
    return answer.was_frozen


async def set_limits(
    handler: RegisteredHandler, target: volumes.TargetPath, limits: volumes.IoLimits
) -> None:
    wire = crust_v1.io_limits_to_wire(limits)
    request = handlers_pb2.SetVolumeLimitsRequest(target_path=target.text, limits=wire)
    await _call(handler, handler.stub.SetVolumeLimits, request, LIMITS_TIMEOUT_S, None)


async def _call(
    handler: RegisteredHandler,
    method: "grpc.aio.UnaryUnaryMultiCallable[Request, Answer]",
    request: Request,
    limit_s: float,
    left_s: float | None,
) -> Answer:
    """`limit_s` is the limit of this call, and `left_s` the time that the caller has left."""
    timeout_s = limit_s if left_s is None else min(limit_s, left_s)
    try:
        answer = await method(request, timeout=timeout_s, metadata=volume_metadata())
    except PeerStatus as refusal:
        error, why = status.to_error(refusal), refusal.why or refusal.what
        is_away = refusal.code in _AWAY and not status.name_in(refusal.trailing)
        if is_away:
            error = HandlerNotResponding(handler.name, why)
        elif refusal.code is grpc.StatusCode.NOT_FOUND:
            # passed on unchanged, it would mean that the volume is not deferred or does not exist
            error = errors.NotReady.named(
                "VolumeUnknownToHandler",
                f"runtime handler {handler.name!r} does not know the volume that its sandbox has",
                why=refusal.what,
            )
        handler.report(error if is_away else None)
        raise error from refusal
    except asyncio.CancelledError as err:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # the call was cancelled, and not this task: the handler's session has ended, and its port with it
        raise HandlerNotResponding(handler.name, "it disconnected during the call") from err
    handler.report(None)
    return answer
