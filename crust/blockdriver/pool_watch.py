"""Opens the pool when it is present, and closes it when it is absent; the driver serves its socket all the time.

A look once per period decides: no event covers all the ways in which a directory comes and goes, and no caller needs
a quick answer. Operations that run when the pool goes away still reach it by the engine's descriptors (`PoolHome`),
and end normally; the watch refuses new calls, and then closes every file of the pool's filesystem.

A pool in Ceph has one active controller. Another controller stands by: its Probe answers "not ready", it is healthy,
and it checks whether it may take over. A replaced controller ends its process: its callers must find the active one.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from crust.blockdriver.ceph.controller_lock import RENEW_S, ControllerReplaced, ControllerStandsBy
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.pool_access import PoolAbsent
from crust.core import errors, metrics
from crust.core.supervised import Health, supervised
from crust.host.process import workers

PERIOD_S = 1.0

_log = logging.getLogger(__name__)


class PoolWatch:
    """The pool of `driver`, whose problems go to `health`. `stop`, then `let_go`, at the end."""

    def __init__(
        self,
        driver: Driver,
        health: Health,
        end: Callable[[errors.CrustError], None],
        *,
        period_s: float = PERIOD_S,
    ) -> None:
        """`end` ends the process."""
        self.driver = driver
        self.component = f"pool of {driver.shown}"
        """The name of the pool's health: a process may have several pools."""
        self._end = end
        self._pool = driver.stores.pool
        self._health = health
        self._period_s = period_s
        self._is_open = False
        self.looked = asyncio.get_running_loop().create_future()
        """The first look has ended."""
        self.pool_id = ""
        """Of the pool that was opened last; empty before."""
        driver.identity.problem = self._named(
            errors.PeerUnavailable(
                "it is being opened",
                why="its disk has not answered yet",
                hint="if it stays so, check the pool's disk and the kernel log",
            )
        )
        self._stands_by = False
        self._held = AsyncExitStack()
        self._tasks = AsyncExitStack()

    @property
    def problem(self) -> errors.CrustError | None:
        return self.driver.identity.problem

    def admit(self, method: str) -> None:
        """Raise the problem of a pool that is not open, for a method that needs one."""
        # all methods of CSI read or write the state, but for identity and capabilities
        is_stateless = method.startswith("/csi.v1.Identity/") or method.endswith("Capabilities")
        if method.startswith("/csi.v1.") and not is_stateless and self.problem is not None:
            raise self.problem

    async def keep_looking(self) -> None:
        """Look now and every period, until cancelled; a begun look ends first: its thread goes on anyway."""
        while True:
            look = asyncio.create_task(self.look())
            try:
                await asyncio.shield(look)
            except asyncio.CancelledError:
                await asyncio.wait([look])
                raise
            finally:
                if not self.looked.done():
                    self.looked.set_result(None)
            await asyncio.sleep(self._period_s)

    async def look(self) -> errors.CrustError | None:
        """Open the pool if it is present, close it if it is absent; returns the problem."""
        problem: errors.CrustError | None = None
        try:
            if self._is_open:
                await workers.run(self._pool.check_in_place)
            else:
                await self._open()
        except errors.CrustError as error:
            problem = self._named(error)
        stands_by = isinstance(problem, ControllerStandsBy)
        if stands_by and not self._stands_by:
            _log.info("this controller stands by", extra={"error": problem})
        self._stands_by = stands_by
        metrics.pool_open.labels(self.driver.shown).set(1 if problem is None or stands_by else 0)
        if problem is not None:
            metrics.forget_pool(self.driver.shown)
        self._health.report(self.component, None if stands_by else problem, is_fatal=False)
        self.driver.identity.problem = problem
        if isinstance(problem, ControllerReplaced):
            self._end(problem)
        if problem is not None and self._is_open:
            _log.error("the pool is closed", extra={"error": problem})
            await self.stop()
            await self.driver.stores.running.idle()
            await self.let_go()
            self._is_open = False
        return problem

    async def stop(self) -> None:
        await self._tasks.aclose()

    async def let_go(self) -> None:
        """Release the pool's lock and directory: another process may have it."""
        await self._held.aclose()

    async def _open(self) -> None:
        pool, driver = self._pool, self.driver
        # First of all: writers wait for the thaw, and the pool may be absent.
        freezer = driver.controller.snapshots.freezer
        await workers.run(partial(freezer.open, is_mounted=True))
        await workers.run(pool.find)
        try:
            self._held.push_async_callback(workers.run, pool.let_go)
            await workers.run(pool.lock)
            renewal = supervised("lock of the pool", self._renew, self._health, of=driver.shown)
            await self._held.enter_async_context(renewal)
            await workers.run(driver.open)
        except BaseException:
            await self._held.aclose()
            raise
        self.pool_id = pool.ids.pool_id
        _log.info("pool opened", extra={"pool_id": self.pool_id})
        self._is_open = True
        works = {
            "garbage collection": driver.keep_collecting_garbage,
            "thaw of guests": freezer.keep_recovering,
        }
        if driver.role.has_controller:
            works["limits of guests"] = driver.controller.modifier.finish_interrupted
            works["pool capacity"] = driver.keep_measuring
            works["health of volumes"] = driver.keep_examining
        for name, work in works.items():
            task = supervised(name, work, self._health, of=driver.shown)
            await self._tasks.enter_async_context(task)

    async def _renew(self) -> None:
        """Until `let_go`: also while the last operations end."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await workers.run(self._pool.renew)
            except ControllerReplaced as error:
                self._end(error)

    def _named(self, error: errors.CrustError) -> errors.CrustError:
        if isinstance(error, PoolAbsent | ControllerStandsBy | ControllerReplaced):
            return error
        named = errors.PeerUnavailable.named(
            "PoolNotOpened",
            f"the pool in {self._pool.shown} is not served",
            why=": ".join(part for part in (error.error_name, error.what, error.why) if part),
            hint=error.hint,
        )
        named.__cause__ = error
        return named
