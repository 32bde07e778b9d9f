"""A runtime handler over real sockets: registered by the SDK, claiming as the SDK does, its guest is only numbers."""

import datetime
import os
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from crust.core import errors, volumes
from crust.core.volumes import HandlerFeature
from crust.handoff import claims, layout
from crust.runtime_handler import registration, service
from crust.runtime_handler.blocking import claim_volume
from tests.support.drivers.fake_driver import Gate
from tests.support.faults.refusals import until

ALL_FEATURES = frozenset(HandlerFeature)
FILESYSTEMS = frozenset({"ext4", "xfs"})
HEALTHY = volumes.VolumeCondition(abnormal=False, message="")
USAGE = (
    volumes.VolumeUsage(volumes.UsageUnit.BYTES, 1000, 400, 500),
    volumes.VolumeUsage(volumes.UsageUnit.INODES, 100, 10, 90),
)


@dataclass
class FakeHandler(service.Handler):
    """`service.Handler`, with answers that a test sets."""

    usage: volumes.VolumeStats = field(default_factory=lambda: volumes.VolumeStats(USAGE))
    condition: volumes.VolumeCondition = HEALTHY
    error: errors.CrustError | None = None
    wrong: Collection[str] = ()
    """Of the runtime itself."""
    filled_bytes: int | None = None
    gate: Gate | None = None
    """Where every call stops."""
    gates: dict[tuple[str, str], Gate] = field(default_factory=dict)
    """Where a call of a method about a target stops."""
    called: list[str] = field(default_factory=list)
    expansions: list[tuple[str, volumes.CapacityRange]] = field(default_factory=list)
    frozen: dict[str, int] = field(default_factory=dict)
    """The frozen targets, and for how many seconds; a test acts as the guest's watchdog by removing one."""
    limits: dict[str, volumes.IoLimits] = field(default_factory=dict)

    async def problems(self) -> Collection[str]:
        return self.wrong

    async def stats(self, target: volumes.TargetPath) -> volumes.VolumeStats:
        await self._pass("stats", target)
        return self.usage

    async def expand(self, target: volumes.TargetPath, capacity: volumes.CapacityRange) -> int:
        await self._pass("expand", target)
        self.expansions.append((target.text, capacity))
        return self.filled_bytes if self.filled_bytes is not None else capacity.required_bytes

    async def health(self, target: volumes.TargetPath) -> volumes.VolumeCondition:
        await self._pass("health", target)
        return self.condition

    async def freeze(self, target: volumes.TargetPath, thaw_after_s: int) -> None:
        await self._pass("freeze", target)
        self.frozen[target.text] = thaw_after_s

    async def thaw(self, target: volumes.TargetPath) -> bool:
        await self._pass("thaw", target)
        return self.frozen.pop(target.text, None) is not None

    async def set_limits(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> None:
        await self._pass("set_limits", target)
        self.limits[target.text] = limits

    async def _pass(self, method: str, target: volumes.TargetPath) -> None:
        self.called.append(method)
        if gate := self.gates.get((method, target.text), self.gate):
            await gate.stop()
        if self.error is not None:
            raise self.error


@asynccontextmanager
async def running(
    handler: FakeHandler,
    *,
    proxy_socket: str,
    endpoint: str,
    name: str = "kata",
    filesystems: frozenset[str] = FILESYSTEMS,
    features: frozenset[HandlerFeature] = ALL_FEATURES,
    max_volumes: int = 0,
    max_path_bytes: int = 0,
    guest_kernel: str = "",
    waits: bool = True,
    served_at: str = "",
) -> AsyncIterator[registration.Registration]:
    """The handler, served and registered, while the block runs; registered at its begin if `waits`.

    `served_at` is the endpoint's path where this process and the proxy have different roots.
    """
    request = registration.RegisterRequest(
        volumes.HandlerName(name),
        "1.0",
        endpoint,
        filesystems,
        features,
        max_volumes,
        max_path_bytes,
        guest_kernel,
    )
    async with (
        service.serving(served_at or endpoint, handler),
        registration.Registration(proxy_socket, request) as session,
    ):
        if waits:
            await until(session.registered)
        yield session


@contextmanager
def sandbox(
    volumes_root: str, target: str, *, name: str = "sandbox-1", handler: str = "kata"
) -> Iterator[None]:
    """A sandbox that has the volume: the lock held, and its name written, while the block runs."""
    parsed = volumes.TargetPath.parse(target)
    paths = layout.Layout(volumes_root).entry(parsed)
    with claims.ClaimLock.acquire(paths, parsed):
        claim = claims.Claim(
            sandbox_id=name, handler=handler, state=claims.State.MOUNTED, error="", pid=os.getpid(),
            claimed_at=datetime.datetime.now(datetime.UTC), live=True,
        )  # fmt: skip
        claims.write(paths, claim)
        yield
        claims.remove(paths)


@contextmanager
def sandbox_with_device(
    volumes_root: str, target: str, *, name: str, handler: str
) -> Iterator[str]:
    """A sandbox that has the volume: it holds lock and device as a VM does. Yields the device."""
    claim = claim_volume(
        volumes_root,
        volumes.TargetPath(target),
        volumes.SandboxId(name),
        volumes.HandlerName(handler),
        features=ALL_FEATURES,
    )
    with claim:
        yield claim.record.device
