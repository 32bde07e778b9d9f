"""Whether the proxy can still work: it needs a thread, and asks for one every few seconds.

Calls that hang keep their threads (`crust.host.process.workers`). When none is left the proxy is unhealthy: every
Probe through it fails, `crust status` says why, and systemd's watchdog, which is told only while a thread can be had,
starts it again. What takes too long is shown before that, and fails no Probe.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from crust import errors, operations
from crust.host.process import systemd
from crust.host.process.workers import NoWorkerFree, Workers
from crust.rpc.health import Health

CHECK_S = 5.0
_SHOWN = 3

_log = logging.getLogger(__name__)


class OperationsHang(errors.PeerUnavailable):
    """Operations of the proxy take longer than they may."""

    def __init__(self, overdue: Sequence[operations.OperationOverdue]) -> None:
        shown = ", ".join(f"{each.name} of {each.key}" for each in overdue[:_SHOWN])
        more = f", and {len(overdue) - _SHOWN} more" if len(overdue) > _SHOWN else ""
        super().__init__(
            f"{len(overdue)} operations of the proxy do not end",
            why=f"{shown}{more}",
            hint="check the disks and mounts of these volumes, and the kernel log for calls that hang",
        )


class WorkerWatch:
    """Checks while `running`. `overdue` has who to ask for what takes too long; `ping` tells the watchdog."""

    def __init__(
        self,
        workers: Workers,
        health: Health,
        *,
        ping: Callable[[], object] = systemd.ping_watchdog,
    ) -> None:
        self.overdue: list[Callable[[], Sequence[operations.OperationOverdue]]] = []
        self._workers = workers
        self._health = health
        self._ping = ping

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check now, and every few seconds while the block runs."""
        task = asyncio.create_task(self._watch(), name="watch workers")
        task.add_done_callback(_ended)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _watch(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(CHECK_S)

    async def check(self) -> None:
        """Ask for a thread, and report."""
        problem: errors.CrustError | None = None
        try:
            await self._workers.probe()
        except NoWorkerFree as error:
            problem = error
        self._health.report("threads", problem)
        hang = [each for ask in self.overdue for each in ask()]
        self._health.report("operations", OperationsHang(hang) if hang else None, is_fatal=False)
        if problem is None:
            self._ping()


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        _log.error("the watch of the threads ended", exc_info=task.exception())
