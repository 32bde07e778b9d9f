"""The watch of the threads of one part of the process: it needs a free thread, and tests that every few seconds.

Calls that hang keep their threads (`crust.host.process.workers`). A process without a free thread is unhealthy: every
Probe through it fails, and /readyz and `crust status` name the part and its operations. One part of a process pings
systemd's watchdog while it has a free thread, and systemd restarts the process without a ping. The health shows
overdue operations before that, and they fail no Probe.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from crust.core import errors
from crust.core.operations import KeyedOperations
from crust.core.printable import some
from crust.core.supervised import Health, supervised
from crust.host.process.workers import NoWorkerFree, Workers

CHECK_S = 5.0
"""Between two checks of a part, in seconds."""


@dataclass(frozen=True, slots=True)
class WorkerWatch:
    """Watches the threads of the pool of one part, and the operations that use them, while `running`.

    Each check without a problem calls `ping`. Without `is_fatal` a problem is shown and fails no Probe.
    """

    workers: Workers
    operations: KeyedOperations
    health: Health
    ping: Callable[[], object] = lambda: None
    is_fatal: bool = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check now, and every few seconds while the block runs."""
        async with supervised("watch of threads", self._watch, self.health, of=self.workers.name):
            yield

    async def _watch(self) -> None:
        while True:
            await self.check_threads()
            await asyncio.sleep(CHECK_S)

    async def check_threads(self) -> None:
        """Test for a free thread, and report the health of "threads of …" and "operations of …"."""
        part = self.workers.name
        problem: NoWorkerFree | None = None
        try:
            await self.workers.probe()
        except NoWorkerFree as error:
            problem = error
            if oldest_first := self.operations.in_progress():
                names = some([f"{running.holder} of {running.key}" for running in oldest_first], 3)
                why = f"{error.why}; the oldest operations are {names}"
                problem = NoWorkerFree(error.name, why)
        self.health.report(f"threads of {part}", problem, is_fatal=self.is_fatal)
        hang: errors.PeerUnavailable | None = None
        if overdue := self.operations.overdue():
            hang = errors.PeerUnavailable.named(
                "OperationsHang",
                f"{len(overdue)} operations of {part} do not end",
                why=some([f"{operation.name} of {operation.key}" for operation in overdue], 3),
            )
        self.health.report(f"operations of {part}", hang, is_fatal=False)
        if problem is None:
            self.ping()
