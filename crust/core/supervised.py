"""The health of a process, and its background work: no loop ends unseen.

A part of the process reports a problem under its own name, and reports again when the problem has ended. A change is
logged, a repeated report is not. Problems are listed by `crust status`, and returned to a Probe.

A task that ends with an exception which nobody awaits is a part of the process that is missing while the process
looks healthy. So a background task is started by `supervised` alone. Work
that fails, whatever the error, is logged, counted and shown as a problem of the process, and begins again after a
pause; or the process ends after `ATTEMPTS` failures in a row, where serving on without the work would be worse than a
restart. Work that returns has ended.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from crust.core import errors, metrics

ATTEMPTS = 10
"""Failures in a row after which a process ends: 50 s of them."""

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 30.0

STEADY_S = 60.0
"""Work that has run for so long is well again."""

_log = logging.getLogger(__name__)


class Health:
    """The problems of this process, by part."""

    def __init__(self) -> None:
        self._problems: dict[str, errors.CrustError] = {}
        self._fatal: set[str] = set()

    @property
    def problems(self) -> Mapping[str, errors.CrustError]:
        """The current problems; empty if the process is healthy."""
        return self._problems

    def report(
        self, part: str, problem: errors.CrustError | None, *, is_fatal: bool = True
    ) -> None:
        """What is wrong with `part` from now on; None: nothing. What is not fatal is shown, and fails no probe."""
        before = self._problems.pop(part, None)
        self._fatal.discard(part)
        if problem is None:
            if before is not None:
                _log.info("healthy again", extra={"part": part})
            return
        self._problems[part] = problem
        if is_fatal:
            self._fatal.add(part)
        if before is None or str(before) != str(problem):
            fields = {"part": part, "error": str(problem), "error_name": problem.error_name}
            _log.error("unhealthy", extra=fields)

    def check_healthy(self) -> None:
        """Raise the first fatal problem, if there is one."""
        for part, problem in self._problems.items():
            if part in self._fatal:
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
    """Run `work` while the block runs, again when it fails; with `end` that is called at last, to end the process.

    `name` is the metric's label; `of`, an id or a path, is shown with it.
    """
    shown = f"{name} of {of}" if of else name
    # Shown from now on: a counter that appears with its first failure has no increase, and its alert misses that one.
    metrics.background_failures.labels(name)
    task = asyncio.create_task(_repeated(name, shown, work, health, end), name=shown)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        health.report(shown, None)


async def _repeated(
    name: str,
    shown: str,
    work: Callable[[], Awaitable[None]],
    health: Health,
    end: Callable[[errors.CrustError], None] | None,
) -> None:
    failures = 0
    while True:
        began_s = time.monotonic()
        well = asyncio.get_running_loop().call_later(STEADY_S, health.report, shown, None)
        try:
            await work()
            health.report(shown, None)
            return
        except (Exception, asyncio.CancelledError) as error:
            if _is_stopped():
                raise
            failures = 1 if time.monotonic() - began_s >= STEADY_S else failures + 1
            metrics.background_failures.labels(name).inc()
            is_bug = not isinstance(error, errors.CrustError)
            extra = {"work": shown, "error": error, "failures": failures}
            _log.error("background work failed", extra=extra, exc_info=is_bug)
            problem = errors.RuntimeFailed.named(
                "BackgroundWorkFails",
                f"background work ({shown}) of this process fails",
                why=f"{failures} times in a row, at last with {type(error).__name__}: {error}",
                hint="it begins again by itself; check the limits of the process, its memory and open files",
            )
            health.report(shown, problem, is_fatal=False)
            if end is not None and failures >= ATTEMPTS:
                end(problem)
                return
        finally:
            well.cancel()
        await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (failures - 1), _MAX_PAUSE_S))


def _is_stopped() -> bool:
    """Whether the block around the work ends; a call inside of it that was cancelled is a failure as any other."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
