"""Coalescing: requests that change one volume within a short window are applied together.

The first request opens a window. Further requests for the volume, with other limits or a size, join it, and one
application answers all of them. A request that contradicts the gathered ones, the same parameter with another value,
is refused alone (ABORTED); it is retried when the others are done. An invalid request is refused before it gets here,
so that it cannot fail others.

While one application of a volume runs, the next requests are gathered and wait for it. An identical request joins
even a running application, but only while no next one is gathered, which might undo it. A caller that is cancelled
cancels nothing.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from crust import errors, operations, volumes
from crust.blockdriver.controller import io_limit_parameters
from crust.blockdriver.controller.modify_volume import Change, Outcome

_log = logging.getLogger(__name__)

_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Pauses between the tries of a start to reach guests. Each try locks the volume."""

LIMIT_S = 120.0
"""How long callers of a change wait, from the first of them on. The change itself goes on."""

Apply = Callable[[volumes.VolumeId, Change], Awaitable[Outcome]]


class ConflictingChange(errors.OperationPending):
    """A request for the volume that is not answered yet has another value for the same parameter."""

    def __init__(self, volume_id: str, what: str) -> None:
        super().__init__(
            f"{volume_id} is not changed",
            why=f"an earlier request, not answered yet, has another {what}",
            hint="retry when that one is answered",
        )
        self.volume_id = volume_id
        self.what = what


@dataclass(slots=True)
class _CoalescedChange:
    change: Change
    requests: int = 1
    began_s: float = field(default_factory=time.monotonic)
    task: asyncio.Task[Outcome] = field(init=False)


class Coalescer:
    """Gathers and applies the changes of volumes. `window_s` is how long the first request waits for others."""

    def __init__(
        self,
        driver: volumes.DriverName,
        running: operations.KeyedOperations,
        apply: Apply,
        *,
        window_s: float,
    ) -> None:
        self._driver = driver
        self._operations = running
        self._apply = apply
        self._window_s = window_s
        self._gathering: dict[volumes.VolumeId, _CoalescedChange] = {}
        self._applying: dict[volumes.VolumeId, _CoalescedChange] = {}
        self._closing = asyncio.Event()

    async def ask(
        self, volume_id: volumes.VolumeId, change: Change, left_s: float | None = None
    ) -> Outcome:
        """Make the change, together with others of the volume; returns the outcome of all of them.

        `left_s` is the time of the caller. Raises `ConflictingChange`, `operations.OperationInProgress`,
        `operations.OperationOverdue`, `operations.ShuttingDown`, and what `apply` raises.
        """
        coalesced = self._join(volume_id, change)
        limit_s = coalesced.began_s + LIMIT_S - time.monotonic()
        if left_s is not None:
            limit_s = min(limit_s, left_s * operations.ANSWER_AT)
        await asyncio.wait([coalesced.task], timeout=max(limit_s, 0))
        if coalesced.task.done():
            return coalesced.task.result()
        key = volumes.VolumeKey(self._driver, volume_id)
        age_s = time.monotonic() - coalesced.began_s
        raise operations.OperationOverdue(key, "a change of size or limits", age_s)

    async def finish(self, volume_ids: Iterable[volumes.VolumeId]) -> None:
        """Finish changes of limits that a killed driver had recorded; those that fail are left to the CO's retry.

        After a reboot of the node the proxy and the handlers start a while later, so this tries several times.
        """
        left = list(volume_ids)
        for pause_s in (0.0, *_PAUSES_S):
            await asyncio.sleep(pause_s)
            left = [each for each in left if not await self._finish(each)]
            if not left:
                return

    async def _finish(self, volume_id: volumes.VolumeId) -> bool:
        """Whether the outcome is final; not while a guest is unreachable, or another operation has the volume."""
        try:
            unmodified = (await self.ask(volume_id, Change(limits=()))).unmodified
        except errors.CrustError as err:
            unmodified = err
        if unmodified is None:
            _log.info("finished a change of limits", extra={"volume_id": volume_id})
            return True
        extra = {"volume_id": volume_id, "error": unmodified}
        _log.warning("a change of limits is unfinished", extra=extra)
        return not isinstance(unmodified, errors.PeerUnavailable | errors.OperationPending)

    async def drain(self) -> None:
        """Close all windows; returns when every application has ended."""
        self._closing.set()
        while changes := (*self._gathering.values(), *self._applying.values()):
            await asyncio.wait([each.task for each in changes])

    def _join(self, volume_id: volumes.VolumeId, change: Change) -> _CoalescedChange:
        coalesced = self._gathering.get(volume_id)
        if coalesced is not None:
            coalesced.change = _merged(volume_id, coalesced.change, change)
            coalesced.requests += 1
            return coalesced
        applying = self._applying.get(volume_id)
        if applying is not None and _is_part(change, applying.change):
            return applying
        coalesced = _CoalescedChange(change)
        self._gathering[volume_id] = coalesced
        coalesced.task = asyncio.create_task(
            self._run(volume_id, coalesced), name=f"changes {volume_id}"
        )
        coalesced.task.add_done_callback(_seen)
        return coalesced

    async def _run(self, volume_id: volumes.VolumeId, coalesced: _CoalescedChange) -> Outcome:
        if self._window_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._window_s)
        while (before := self._applying.get(volume_id)) is not None:
            await asyncio.wait([before.task])
        del self._gathering[volume_id]
        self._applying[volume_id] = coalesced
        try:
            return await self._operations.run(
                volumes.VolumeKey(self._driver, volume_id),
                "ControllerModifyVolume"
                if coalesced.change.limits is not None
                else "ControllerExpandVolume",
                coalesced.change,
                lambda: self._apply(volume_id, coalesced.change),
            )
        finally:
            del self._applying[volume_id]
            if coalesced.requests > 1:
                _log.info("applied coalesced requests", extra={"requests": coalesced.requests})


def _seen(task: asyncio.Task[Outcome]) -> None:
    """Log the error: all callers may have been cancelled."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.debug("a change failed", extra={"error": error})


def _is_part(change: Change, combined: Change) -> bool:
    limits = change.limits is None or (
        combined.limits is not None and set(change.limits) <= set(combined.limits)
    )
    return limits and change.expansion in (None, combined.expansion)


def _merged(volume_id: volumes.VolumeId, gathered: Change, added: Change) -> Change:
    """Both changes in one; raises `ConflictingChange`."""
    if None not in (gathered.expansion, added.expansion) and (
        gathered.expansion != added.expansion
    ):
        raise ConflictingChange(volume_id, "size")
    return Change(
        limits=_merged_limits(volume_id, gathered.limits, added.limits),
        expansion=gathered.expansion or added.expansion,
    )


def _merged_limits(
    volume_id: volumes.VolumeId,
    gathered: io_limit_parameters.Changes | None,
    added: io_limit_parameters.Changes | None,
) -> io_limit_parameters.Changes | None:
    if gathered is None or added is None:
        return gathered if added is None else added
    limits = dict(gathered)
    for name, value in added:
        if limits.setdefault(name, value) != value:
            raise ConflictingChange(volume_id, name)
    return tuple(sorted(limits.items()))
