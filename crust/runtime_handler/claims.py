"""A sandbox's claim on the volume of a mount source, in coroutines; `crust.runtime_handler.blocking` says the rules.

The claim is taken, and given back, in one hop to a thread, because it locks, writes and syncs. A caller that is
cancelled meanwhile has no claim: the thread gives it back.
"""

import functools
from collections.abc import Awaitable, Callable, Collection
from types import TracebackType
from typing import Self

import aiofiles.os

from crust.core import volumes
from crust.handoff.record import Record
from crust.host.process.processes import Process
from crust.runtime_handler import threads
from crust.runtime_handler.blocking import claim as blocking
from crust.runtime_handler.blocking import resolve, take_claim

_process_of = aiofiles.os.wrap(blocking.process_of)
_resolve_source = aiofiles.os.wrap(resolve.resolve_source)


class Claim:
    """The claim of one sandbox on one volume, made by `claim_volume`, `adopt_volume` or `reclaim_volume`."""

    def __init__(self, held: blocking.Claim) -> None:
        self._held = held

    @property
    def record(self) -> Record:
        """The record at the time of the claim or adoption, with the group that a CO gave to the guard mount."""
        return self._held.record

    @property
    def sandbox_id(self) -> volumes.SandboxId:
        return self._held.sandbox_id

    @property
    def fds(self) -> tuple[int, ...]:
        """See `blocking.Claim.fds`: the descriptors for the hypervisor."""
        return self._held.fds

    async def grow_and_report(
        self, grow: Callable[[], Awaitable[object]], *, process: Process | None = None
    ) -> None:
        """After the sandbox has mounted the volume: grow its filesystem to its device, then write claim.json.

        `grow` is called unless the volume is read-only: a device grows while nobody has it mounted, and a clone can
        be larger than its source (H-48). `grow` must not change a filesystem that fills its device. `process` is the
        hypervisor's, if it was started after the claim. Raises as `blocking.Claim.report_mounted`, and the errors of
        `grow`; then the state is not written.
        """
        if not self.record.readonly:
            await grow()
        await threads.run(functools.partial(self._held.report_mounted, process))

    async def report_error(self, error: str) -> None:
        """See `blocking.Claim.report_error`: why the sandbox cannot use the volume."""
        await threads.run(functools.partial(self._held.report_error, error))

    async def hand_over(self, to: int, *or_to: int) -> None:
        """See `blocking.Claim.hand_over`: the claim lives as long as that process, or one of these."""
        await threads.run(functools.partial(self._held.hand_over, to, *or_to))

    async def close(self) -> None:
        """See `blocking.Claim.close`: close the copy of an adopted claim."""
        await threads.run(self._held.close)

    async def release(self, *, error: str = "") -> None:
        """See `blocking.Claim.release`: after the sandbox has ended, or has given the device back."""
        await threads.run(functools.partial(self._held.release, error=error))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.release(error=blocking.reason(error))


async def claim_volume(
    root: str,
    target: volumes.TargetPath,
    sandbox_id: volumes.SandboxId,
    handler: volumes.HandlerName,
    *,
    features: Collection[volumes.HandlerFeature] = frozenset(),
    process: Process | None = None,
) -> Claim:
    """As `blocking.claim_volume`; raises `NoWorkerFree` too."""
    claim = functools.partial(
        take_claim.claim_volume,
        root,
        target,
        sandbox_id,
        handler,
        features=features,
        process=process,
    )
    return Claim(await threads.run_or_undo(claim, blocking.Claim.release))


async def reclaim_volume(
    root: str,
    target: volumes.TargetPath,
    sandbox_id: volumes.SandboxId,
    handler: volumes.HandlerName,
    process: Process,
) -> Claim:
    """As `blocking.reclaim_volume`; raises `NoWorkerFree` too.

    A cancelled caller leaves claim.json, which names the process that lives.
    """
    claim = functools.partial(take_claim.reclaim_volume, root, target, sandbox_id, handler, process)
    return Claim(await threads.run_or_undo(claim, blocking.Claim.close))


async def adopt_volume(
    root: str,
    target: volumes.TargetPath,
    sandbox_id: volumes.SandboxId,
    handler: volumes.HandlerName,
    holder_pid: int,
) -> Claim:
    """As `blocking.adopt_volume`; raises `NoWorkerFree` too."""
    claim = functools.partial(
        take_claim.adopt_volume, root, target, sandbox_id, handler, holder_pid
    )
    return Claim(await threads.run_or_undo(claim, blocking.Claim.close))


async def resolve_source(root: str, source: str) -> resolve.Resolved | resolve.NotDeferred:
    """As `blocking.resolve_source`, for a source whose filesystem may hang; raises `NoWorkerFree` too."""
    await threads.POOL.check_free()
    resolved: resolve.Resolved | resolve.NotDeferred
    resolved = await _resolve_source(root, source, executor=threads.EXECUTOR)
    return resolved


async def process_of(pid: int) -> Process:
    """As `blocking.process_of`; raises `NoWorkerFree` too."""
    await threads.POOL.check_free()
    process: Process = await _process_of(pid, executor=threads.EXECUTOR)
    return process
