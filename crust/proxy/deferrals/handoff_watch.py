"""Keeps the index of the handoff directory current, and reports the runtimes' claims as events.

Runtimes write the claims, so the proxy learns of them by scanning. An event of the watch means "scan again"; what
the scans have read becomes events.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from crust import errors
from crust.handoff import watch
from crust.handoff.store import Entry, Store
from crust.proxy.deferrals.claim_events import ClaimEvents
from crust.proxy.deferrals.deferred import DeferredVolumes
from crust.proxy.deferrals.events import Events
from crust.supervised import Reports, supervised

_PAUSE_FACTOR = 10
"""After a scan, pause for this many times its duration. Hints coalesce meanwhile."""

_MAX_PAUSE_S = 2.0

Check = Callable[[Sequence[Entry]], Awaitable[None]]


@asynccontextmanager
async def watch_handoff(  # noqa: PLR0913 - the proxy's parts, and what the process gives
    store: Store,
    deferred: DeferredVolumes,
    events: Events,
    health: Reports,
    *,
    check: Check | None = None,
    end: Callable[[errors.CrustError], None] | None = None,
    rescan_s: float | None = None,
) -> AsyncIterator[None]:
    """Scan after each hint while the block runs. `check` gets what was read.

    If looks keep failing, `end` is called: a proxy that sees no claims and no changes is worse than one that is
    restarted.
    """
    async with watch.Watch(store.root, rescan_s=rescan_s, touches_only=True) as hints:
        claims = ClaimEvents(events)

        async def looks() -> None:
            while True:
                await _look(hints, deferred, claims, check)

        async with supervised("watch of the handoff directory", looks, health, end=end):
            yield


async def _look(
    hints: watch.Watch, deferred: DeferredVolumes, claims: ClaimEvents, check: Check | None
) -> None:
    await anext(hints)
    began_s = time.monotonic()
    read = await deferred.look()
    for entry in read:
        claims.report(entry)
    claims.report_gone(deferred.has)
    if check is not None:
        last = {entry.digest: entry for entry in read}
        await check([each for each in last.values() if _is_there(each, deferred)])
    await asyncio.sleep(min(_PAUSE_FACTOR * (time.monotonic() - began_s), _MAX_PAUSE_S))


def _is_there(entry: Entry, deferred: DeferredVolumes) -> bool:
    """Not if it was unpublished since it was read: then its device may be gone, which is no problem."""
    return entry.record is not None and deferred.has(entry.record.target)
