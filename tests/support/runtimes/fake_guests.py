"""Guests that have deferred volumes, as the driver sees them: in process, or behind a Runtime API on a socket.

A guest keeps state: frozen or not, and the limits that it obeys. Nothing in here looks at a clock: a test that wants
the guest's own watchdog to thaw calls `Guest.watchdog`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from crust.blockdriver.guests import Guests
from crust.core import errors, volumes
from crust.rpc.messages import crust_v1
from crust.rpc.serving import server
from crust.rpc.serving.service import Service, methods_of
from crust.wire.v1 import runtime_pb2


@dataclass
class Guest:
    """One deferred target. `running`: a sandbox has the volume. `error` is raised by the next call."""

    running: bool = True
    frozen: bool = False
    thaw_after_s: int = 0
    limits: volumes.IoLimits = field(default_factory=volumes.IoLimits)
    applied: volumes.IoLimits | None = None
    error: errors.CrustError | None = None
    error_when_limited: errors.CrustError | None = None
    """Becomes `error` when it got limits."""
    limited: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it got limits."""

    def watchdog(self) -> None:
        """The guest thaws by itself, because it was frozen for too long."""
        self.frozen = False


class FakeGuests(Guests):
    """By target path; `asked` is what was asked, in order, as (call, target)."""

    def __init__(self) -> None:
        super().__init__("/run/crust/runtime.sock")
        self.by_target: dict[str, Guest] = {}
        self.asked: list[tuple[str, str]] = []
        self.closed = False

    def add(self, target: str, *, running: bool = True) -> Guest:
        guest = Guest(running=running)
        self.by_target[target] = guest
        return guest

    async def freeze(self, target: volumes.TargetPath, thaw_after_s: int) -> bool:
        guest = self._guest("freeze", target)
        if not 1 <= thaw_after_s <= 60:
            raise errors.InvalidRequest("thaw_after_seconds is not usable")
        guest.frozen = guest.running
        guest.thaw_after_s = thaw_after_s
        return guest.frozen

    async def thaw(self, target: volumes.TargetPath) -> bool:
        guest = self._guest("thaw", target)
        was_frozen, guest.frozen = guest.frozen, False
        return was_frozen

    async def set_limits(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> bool:
        """Keeps the limits, and applies them if it runs."""
        guest = self._guest("set_limits", target)
        guest.limits = limits
        guest.applied = limits if guest.running else None
        guest.limited.set()
        guest.error = guest.error_when_limited or guest.error
        return guest.running

    async def close(self) -> None:
        self.closed = True

    def _guest(self, verb: str, target: volumes.TargetPath) -> Guest:
        self.asked.append((verb, target.text))
        guest = self.by_target.get(target.text)
        if guest is None:
            raise errors.NotFound(f"no volume is deferred at {target}")
        if guest.error is not None:
            raise guest.error
        return guest


class _RuntimeApi:
    """The three calls that a driver makes, answered by `FakeGuests`."""

    def __init__(self, guests: FakeGuests) -> None:
        self._guests = guests

    async def RuntimeFreezeVolume(self, request: Any, context: Any) -> Any:
        frozen = await self._guests.freeze(_target(request), request.thaw_after_seconds)
        return runtime_pb2.RuntimeFreezeVolumeResponse(frozen=frozen)

    async def RuntimeThawVolume(self, request: Any, context: Any) -> Any:
        was_frozen = await self._guests.thaw(_target(request))
        return runtime_pb2.RuntimeThawVolumeResponse(was_frozen=was_frozen)

    async def RuntimeSetVolumeLimits(self, request: Any, context: Any) -> Any:
        limits = crust_v1.io_limits(request.limits)
        applied = await self._guests.set_limits(_target(request), limits)
        return runtime_pb2.RuntimeSetVolumeLimitsResponse(applied=applied)


def _target(request: Any) -> volumes.TargetPath:
    return volumes.TargetPath.parse(request.volume_target_path)


@asynccontextmanager
async def serving(guests: FakeGuests, socket: str) -> AsyncIterator[None]:
    """`guests` behind a Runtime API on `socket` while the block runs."""
    runtime = runtime_pb2.DESCRIPTOR.services_by_name["Runtime"]
    service = Service("proxy", methods_of(_RuntimeApi(guests), runtime))
    async with server.serving(socket, service):
        yield
