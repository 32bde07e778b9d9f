"""Keeps the index of the handoff directory current, and reports the runtimes' claims as events.

Runtimes write the claims, so the proxy learns of them by scanning. An event of the watch means "scan again"; the
differences between two scans become events.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from crust import errors
from crust.handoff import watch
from crust.handoff.store import Entry, Store
from crust.proxy.deferred import DeferredVolumes
from crust.proxy.events import Event, Events

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
    rescan_s: float = watch.RESCAN_S,
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
    failed = 0
    while True:
        try:
            await _look(hints, deferred, events, check)
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
    hints: watch.Watch, deferred: DeferredVolumes, events: Events, check: Check | None
) -> None:
    await anext(hints)
    began_s = time.monotonic()
    changes = await deferred.look()
    for before, now in changes:
        _report(before, now, events)
    if check is not None:
        await check([now for _, now in changes])
    await asyncio.sleep(min(_PAUSE_FACTOR * (time.monotonic() - began_s), _MAX_PAUSE_S))


def _holder(entry: Entry | None) -> str:
    return entry.claim.sandbox_id if entry and entry.live and entry.claim is not None else ""


def _report(before: Entry | None, now: Entry, events: Events) -> None:
    holder, holder_before = _holder(now), _holder(before)
    if holder == holder_before or now.record is None:
        return
    kind = "claimed" if holder else "released"
    message = f"sandbox {holder or holder_before}"
    _log.info(kind, extra={"target": now.record.target.text, "sandbox": holder or holder_before})
    events.emit(Event(kind, now.record.target.text, now.record.handler, message))


def _ended(task: asyncio.Task[None], ended: Callable[[errors.CrustError], None] | None) -> None:
    if task.cancelled():
        return
    error = task.exception()
    _log.error("the watch of the handoff directory ended", exc_info=error)
    if ended is not None and isinstance(error, errors.CrustError):
        ended(error)
