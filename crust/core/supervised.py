"""The health of a process, and its background work: the end of each loop is noticed.

A component reports a problem under its own name, and reports again when the problem has ended. A change is
logged, a repeated report is not. Problems are listed by `crust status`, and returned to a Probe.

If a task that no other task awaits ends with an exception, a component is missing while the process looks
healthy. So only `supervised` starts background tasks. Each failure, by any error, is logged, counted and shown as a
problem of the process, and the work begins again after a pause. Where serving without the work would be worse than a
restart, the process ends after `ATTEMPTS` failures in a row. Work that returns has ended.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from crust.core import errors, metrics
from crust.core.pauses import pauses

ATTEMPTS = 10
"""Failures in a row after which a process ends, 25 to 50 s after the first."""

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 30.0

STEADY_S = 60.0
"""Work that has run for so long is healthy again."""

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Health:
    """The problems of this process, by component."""

    problems: dict[str, errors.CrustError] = field(default_factory=dict)
    """The current problems; empty if the process is healthy. `report` changes them."""
    _fatal: set[str] = field(default_factory=set)

    def report(
        self, component: str, problem: errors.CrustError | None, *, is_fatal: bool = True
    ) -> None:
        """Set the problem of `component`; None: it is healthy. A problem that is not fatal fails no probe."""
        previous = self.problems.pop(component, None)
        self._fatal.discard(component)
        if problem is None:
            if previous is not None:
                _log.info("healthy again", extra={"component": component})
            return
        self.problems[component] = problem
        if is_fatal:
            self._fatal.add(component)
        if previous is None or str(previous) != str(problem):
            named = {"component": component, "error_name": problem.error_name}
            _log.error("unhealthy", extra={**named, "error": str(problem)})

    def check_healthy(self) -> None:
        """Raise the first fatal problem, if there is one."""
        for component, problem in self.problems.items():
            if component in self._fatal:
                raise problem


@asynccontextmanager
async def supervised(
    name: str,
    work: Callable[[], Awaitable[None]],
    health: Health,
    *,
    of: str = "",
    end: Callable[[errors.CrustError], None] | None = None,
) -> AsyncIterator[None]:
    """Run `work` while the block runs, and again when it fails. After too many failures `end` is called, if given.

    `name` is the metric's label; `of`, an id or a path, is shown with it.
    """
    label = f"{name} of {of}" if of else name
    # Exported from now on: a counter that appears with its first failure has no increase, and its alert misses it.
    metrics.background_failures.labels(name)
    task = asyncio.create_task(_repeated(name, label, work, health, end), name=label)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        health.report(label, None)


async def _repeated(
    name: str,
    label: str,
    work: Callable[[], Awaitable[None]],
    health: Health,
    end: Callable[[errors.CrustError], None] | None,
) -> None:
    failures, again = 0, pauses(_FIRST_PAUSE_S, _MAX_PAUSE_S)
    while True:
        began_s = time.monotonic()
        well = asyncio.get_running_loop().call_later(STEADY_S, health.report, label, None)
        try:
            await work()
            health.report(label, None)
            return
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            # a cancelled call inside the work is a failure like any other
            if task is not None and task.cancelling() > 0:
                raise
            if time.monotonic() - began_s >= STEADY_S:
                failures, again = 0, pauses(_FIRST_PAUSE_S, _MAX_PAUSE_S)
            failures += 1
            metrics.background_failures.labels(name).inc()
            is_bug = not isinstance(error, errors.CrustError)
            extra = {"work": label, "error": error, "failures": failures}
            _log.error("background work failed", extra=extra, exc_info=is_bug)
            problem = errors.RuntimeFailed.named(
                "BackgroundWorkFails",
                f"background work ({label}) of this process fails",
                why=f"{failures} times in a row, at last with {type(error).__name__}: {error}",
            )
            health.report(label, problem, is_fatal=False)
            if end is not None and failures >= ATTEMPTS:
                end(problem)
                return
        finally:
            well.cancel()
        await asyncio.sleep(next(again))
