"""The state that the servers of one process share: the process's lock, its health, its readiness.

A process that finds the lock held waits for it: its predecessor drains and ends, or the kernel frees the lock of a
killed process. Only one process has the lock, so only one writes. Callers see UNAVAILABLE in the gap between the two,
and a CO calls again. After `LOCK_WAIT_S` the waiting process names the holder and ends: two daemons that are
installed by mistake with one run directory must not wait unseen.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from crust.core import errors, metrics
from crust.core.supervised import Health
from crust.host.files import locks
from crust.host.process import systemd, workers

_log = logging.getLogger(__name__)

LOCK_WAIT_S = 60.0
"""How long a process waits for its predecessor's lock: systemd ends a start that takes 90 s."""

_LOCK_PERIOD_S = 0.1


class NotServing(errors.PeerUnavailable):
    def __init__(self) -> None:
        super().__init__(
            "this process does not serve", why="it has not finished its start, or it stops"
        )


started: contextvars.ContextVar[Callable[["Daemon"], None]] = contextvars.ContextVar("started")
"""The callback for the process that starts in this context: the server of its health sets it."""


class Daemon:
    def __init__(self) -> None:
        self.health = Health()
        problems = self.health.problems  # read by any thread
        metrics.export_problems(lambda: [each.error_name for each in tuple(problems.values())])
        self.readiness: list[Callable[[], errors.CrustError | None]] = []
        """Obstacles of the parts besides `health`; `check_ready` calls each."""
        self._is_serving = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def serves(self) -> AsyncIterator[None]:
        """All parts serve while the block runs; tells systemd."""
        self._is_serving = True
        systemd.report_serving()
        try:
            yield
        finally:
            self._is_serving = False

    def check_ready(self) -> None:
        """Raise an error if this process cannot serve all calls now."""
        if not self._is_serving:
            raise NotServing()
        self.health.check_healthy()
        for problem in (check() for check in self.readiness):
            if problem is not None:
                raise problem

    def end(self, error: errors.CrustError) -> None:
        """End the process with an error, because a part of it cannot go on."""
        if not self._failed.done():
            self._failed.set_exception(error)

    async def forever(self) -> None:
        """Wait until cancelled; raises the error of `end`."""
        await self._failed


@asynccontextmanager
async def starting(lock_path: str) -> AsyncIterator[Daemon]:
    """The process that holds the lock while the block runs; raises `locks.LockHeld` after `LOCK_WAIT_S`.

    The lock is released last: every part has ended, and with it every operation.
    """
    lock = await _locked(lock_path)
    try:
        daemon = Daemon()
        announce = started.get(None)
        if announce is not None:
            announce(daemon)
        yield daemon
    finally:
        lock.close()


async def _locked(path: str) -> locks.ProcessLock:
    try:
        return await workers.run(locks.ProcessLock.acquire, path)
    except locks.LockHeld as error:
        _log.warning("this process waits for another process to end", extra={"error": error})
    ends_s = time.monotonic() + LOCK_WAIT_S
    while time.monotonic() < ends_s:
        await asyncio.sleep(_LOCK_PERIOD_S)
        lock = await workers.run(locks.ProcessLock.try_acquire, path)
        if lock is not None:
            return lock
    return await workers.run(locks.ProcessLock.acquire, path)
