"""The work of the engine's calls in threads: it has a deadline, and one thread for a volume.

The engine makes one call at a time, and ends the connection of a late plugin, so a call is answered by its deadline
whatever hangs. A thread cannot be ended: when its caller gave up it goes on, undoes its steps (`Attempt`), and until
then has its volumes. A later call for one of them is refused at once, with no thread, so a device that hangs delays
its own volume alone.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from crust.core import errors
from crust.host.process import workers

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Attempt:
    """Whether the work of a call counts: its thread commits it, or its caller gave up before.

    `deadline_s` is the caller's, of time.monotonic().
    """

    deadline_s: float
    _undecided: threading.Lock = field(default_factory=threading.Lock)

    def decide(self) -> bool:
        """Called by both: False if the other one was first. A thread must undo its steps then."""
        return self._undecided.acquire(blocking=False)


@dataclass(eq=False)
class VolumeWork:
    _running: dict[str, str] = field(default_factory=dict)
    """The container whose call works on the volume, by the name of its entry."""

    async def run(
        self,
        names: Collection[str],
        container: str,
        deadline_s: float,
        work: Callable[[Attempt], None],
    ) -> None:
        """Run the work in a thread until the deadline, of time.monotonic(); what it has not committed is undone then.

        What it has committed counts, and its thread goes on. Raises `EngineTimeOver`, and the errors of `work`.
        """
        for name in names:
            if name in self._running:
                raise _time_over(
                    container,
                    f"an earlier call, of container {self._running[name]}, has not returned: a device, a lock or a "
                    "path of its volume does not answer",
                )
        self._running.update(dict.fromkeys(names, container))
        attempt = Attempt(deadline_s)
        running = asyncio.ensure_future(workers.run(work, attempt))
        running.add_done_callback(partial(self._free, tuple(names)))
        await asyncio.wait((running,), timeout=max(0.0, deadline_s - time.monotonic()))
        if running.done():
            await running
            return
        running.add_done_callback(_log_failure)
        if attempt.decide():
            raise _time_over(
                container,
                "a volume's device, its lock or a path did not answer within the time of the container engine",
            )

    def _free(self, names: Collection[str], _: "asyncio.Future[None]") -> None:
        for name in names:
            del self._running[name]


def _log_failure(running: "asyncio.Future[None]") -> None:
    error = None if running.cancelled() else running.exception()
    if error is not None:
        _log.warning("work whose time was over has failed", extra={"error": error})


def _time_over(container: str, why: str) -> errors.CrustError:
    return errors.PeerUnavailable.named(
        "EngineTimeOver", f"container {container} was not prepared in time", why=why
    )
