"""Keeps the index of the handoff directory current, and reports the runtimes' claims as events.

Runtimes write the claims, so the proxy learns of them by scanning. An event of the watch means "scan again"; the
differences between two scans become events.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from crust import errors
from crust.handoff import watch
from crust.handoff.store import Entry, Store
from crust.proxy.deferred import DeferredVolumes
from crust.proxy.events import Event, Events

_PAUSE_FACTOR = 10
"""After a scan, pause for this many times its duration. Hints coalesce meanwhile."""

_MAX_PAUSE_S = 2.0

_log = logging.getLogger(__name__)


@asynccontextmanager
async def watch_handoff(
    store: Store, deferred: DeferredVolumes, events: Events
) -> AsyncIterator[None]:
    """Scan after each hint while the block runs. If the watch ends by itself, that is logged as an error."""
    async with watch.Watch(store.root, touches_only=True) as hints:
        task = asyncio.create_task(_scan(hints, deferred, events), name="watch handoff")
        task.add_done_callback(_ended)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _scan(hints: watch.Watch, deferred: DeferredVolumes, events: Events) -> None:
    async for _ in hints:
        began_s = time.monotonic()
        try:
            changes = await deferred.look()
        except errors.CrustError as error:  # e.g. no memory or descriptor: there is a next scan
            _log.error("cannot scan the handoff directory", extra={"error": error})
            continue
        for before, now in changes:
            _report(before, now, events)
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


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("the watch of the handoff directory ended", exc_info=task.exception())
