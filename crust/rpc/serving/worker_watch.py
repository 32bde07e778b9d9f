"""Whether a part of the process can still work: it needs a thread, and asks for one every few seconds.

Calls that hang keep their threads (`crust.host.process.workers`). When none is left the process is unhealthy: every
Probe through it fails, /readyz and `crust status` say which part it is and what hangs, and systemd's watchdog, which
one part of a process tells, and only while it can have a thread, starts it again. What takes too long is shown before
that, and fails no Probe.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from crust.core import errors
from crust.core.operations import KeyedOperations
from crust.core.supervised import Health, supervised
from crust.host.process.workers import NoWorkerFree, Workers

CHECK_S = 5.0
"""Between two checks of a part, in seconds."""
_SHOWN = 3


class WorkerWatch:
    """Watches the threads of one part of the process, which the pool names, and the operations that use them; checks
    while `running`.

    `ping` is called while all is well: one part of a process tells the watchdog. What is not fatal is shown, and
    fails no Probe of the process.
    """

    def __init__(
        self,
        workers: Workers,
        operations: KeyedOperations,
        health: Health,
        *,
        ping: Callable[[], object] = lambda: None,
        is_fatal: bool = True,
    ) -> None:
        self._workers = workers
        self._operations = operations
        self._health = health
        self._ping = ping
        self._is_fatal = is_fatal

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check now, and every few seconds while the block runs."""
        async with supervised("watch of threads", self._watch, self._health, of=self._workers.name):
            yield

    async def _watch(self) -> None:
        while True:
            await self.check_threads()
            await asyncio.sleep(CHECK_S)

    async def check_threads(self) -> None:
        """Ask for a thread, and report as the health of "threads of …" and "operations of …"."""
        part, problem, hang = self._workers.name, await self._no_thread(), None
        self._health.report(f"threads of {part}", problem, is_fatal=self._is_fatal)
        overdue = self._operations.overdue()
        if overdue:
            hang = errors.PeerUnavailable.named(
                "OperationsHang",
                f"{len(overdue)} operations of {part} do not end",
                why=_shown([f"{operation.name} of {operation.key}" for operation in overdue]),
                hint="check the disks and mounts of these volumes, and the kernel log for calls that hang",
            )
        self._health.report(f"operations of {part}", hang, is_fatal=False)
        if problem is None:
            self._ping()

    async def _no_thread(self) -> NoWorkerFree | None:
        try:
            await self._workers.probe()
        except NoWorkerFree as error:
            running = self._operations.in_progress()
            oldest = sorted(running, key=lambda operation: operation.age_s, reverse=True)
            if not oldest:
                return error
            names = _shown([f"{operation.holder} of {operation.key}" for operation in oldest])
            return NoWorkerFree(error.name, f"{error.why}; the oldest operations are {names}")
        return None


def _shown(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
