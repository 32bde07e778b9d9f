"""Keeps the picture of the handoff directory true, and tells what runtimes do in it.

Claims are the runtimes' writing, so the proxy learns of them only by looking. An event of the watch means "look
again"; the differences between two looks are what is told.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from crust import errors
from crust.handoff import watch
from crust.handoff.store import Entry, Store
from crust.proxy.deferred import DeferredVolumes
from crust.proxy.events import Event, Events

_REST = 10
"""How many times as long as a look took nobody looks again. Hints that come meanwhile are one."""

_REST_AT_MOST_S = 2.0

_log = logging.getLogger(__name__)


@asynccontextmanager
async def watch_handoff(
    store: Store, deferred: DeferredVolumes, events: Events
) -> AsyncIterator[None]:
    """Look whenever something changes, while the block runs. A watch that ends by itself is logged as an error."""
    async with watch.Watch(store.root, touches_only=True) as hints:
        task = asyncio.create_task(_look(hints, deferred, events), name="watch handoff")
        task.add_done_callback(_ended)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _look(hints: watch.Watch, deferred: DeferredVolumes, events: Events) -> None:
    before: Mapping[str, str] = {}
    async for _ in hints:
        began_s = time.monotonic()
        try:
            entries = await deferred.load()
        except (
            errors.CrustError
        ) as error:  # no memory, no descriptor: the next hint is at most a floor away
            _log.error("cannot look at the handoff directory", extra={"error": error})
            continue
        now = {entry.directory: _holder(entry) for entry in entries}
        for entry in entries:
            _tell(entry, before.get(entry.directory, ""), events)
        before = now
        # a look reads every entry: publishes must not wait for a tenth of a second of that after each of them
        await asyncio.sleep(min(_REST * (time.monotonic() - began_s), _REST_AT_MOST_S))


def _holder(entry: Entry) -> str:
    return entry.claim.sandbox_id if entry.live and entry.claim is not None else ""


def _tell(entry: Entry, holder_before: str, events: Events) -> None:
    holder = _holder(entry)
    if holder == holder_before or entry.record is None:
        return
    kind = "claimed" if holder else "released"
    message = f"sandbox {holder or holder_before}"
    _log.info(kind, extra={"target": entry.record.target.text, "sandbox": holder or holder_before})
    events.emit(Event(kind, entry.record.target.text, entry.record.handler, message))


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error(
            "the watch ended; claims are seen at the next look only", exc_info=task.exception()
        )
