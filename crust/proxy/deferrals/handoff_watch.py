"""Keeps the index of the handoff directory current, and reports the runtimes' claims as events.

Runtimes write the claims, so the proxy learns of them by scanning. An event of the watch means "scan again"; what
the scans have read becomes events.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from crust import errors
from crust.handoff import watch
from crust.handoff.store import Entry, Store
from crust.proxy.deferrals.claim_events import ClaimEvents
from crust.proxy.deferrals.deferred import DeferredVolumes
from crust.proxy.deferrals.events import Events

_PAUSE_FACTOR = 10
"""After a scan, pause for this many times its duration. Hints coalesce meanwhile."""

_MAX_PAUSE_S = 2.0
_FIRST_PAUSE_S = 0.05

_ATTEMPTS = 20
"""Half a minute of looks that fail."""

_log = logging.getLogger(__name__)


class HandoffNotRead(errors.PeerUnavailable):
    """The handoff directory could not be looked at for too long."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            "the proxy does not see the handoff directory any more",
            why=f"the last {_ATTEMPTS} looks failed: {error}",
            hint="it ends, to be started again; check the limits of its processes, memory and open files",
        )


Check = Callable[[Sequence[Entry]], Awaitable[None]]


@asynccontextmanager
async def watch_handoff(
    store: Store,
    deferred: DeferredVolumes,
    events: Events,
    *,
    check: Check | None = None,
    ended: Callable[[errors.CrustError], None] | None = None,
    rescan_s: float | None = None,
) -> AsyncIterator[None]:
    """Scan after each hint while the block runs. `check` gets what was read.

    A look that fails is tried again. If looks keep failing, `ended` is called: a proxy that sees no claims and no
    changes is worse than one that is restarted.
    """
    async with watch.Watch(store.root, rescan_s=rescan_s, touches_only=True) as hints:
        task = asyncio.create_task(_scan(hints, deferred, events, check), name="watch handoff")
        task.add_done_callback(lambda done: _ended(done, ended))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _scan(
    hints: watch.Watch, deferred: DeferredVolumes, events: Events, check: Check | None
) -> None:
    claims, failed = ClaimEvents(events), 0
    while True:
        try:
            await _look(hints, deferred, claims, check)
            failed = 0
        # Also a bug, MemoryError, or RuntimeError when no thread can be started: a narrower class would end the
        # watch, and the proxy would serve on without seeing claims. If all looks fail, the process ends.
        except Exception as error:
            failed += 1
            is_bug = not isinstance(error, errors.CrustError)
            _log.error("cannot scan the handoff directory", extra={"error": error}, exc_info=is_bug)
            if failed == _ATTEMPTS:
                raise HandoffNotRead(error) from error
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2**failed, _MAX_PAUSE_S))


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


def _ended(task: asyncio.Task[None], ended: Callable[[errors.CrustError], None] | None) -> None:
    if task.cancelled():
        return
    error = task.exception()
    _log.error("the watch of the handoff directory ended", exc_info=error)
    if ended is not None and isinstance(error, errors.CrustError):
        ended(error)
