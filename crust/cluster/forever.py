"""Work in the background that must not end in silence: what it did not expect is logged and counted, and it begins
again. A process whose lease is renewed while its work has ended would look alive, and serve nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from crust import metrics

_log = logging.getLogger(__name__)

_PAUSE_S = 1.0


async def forever(work: Callable[[], Awaitable[None]], what: str) -> None:
    """Run `work` until it returns; begin it again when it fails. `what` is the label of the metric."""
    # Shown from now on: a counter that appears with its first fault has no increase, and its alert misses that one.
    metrics.cluster_work_failures.labels(what)
    while True:
        try:
            await work()
        except Exception:
            metrics.cluster_work_failures.labels(what).inc()
            _log.exception("work for the cluster failed and begins again", extra={"work": what})
            await asyncio.sleep(_PAUSE_S)
        else:
            return
