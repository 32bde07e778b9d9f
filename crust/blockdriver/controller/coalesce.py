"""Changes of one volume that come together are made together.

The first request opens a window; what is asked of the volume meanwhile, more limits or another size, joins it, and
all are answered by one application. A newcomer that contradicts what was gathered, the same thing with another value,
is refused alone (ABORTED): it comes again when the others are done. What is no request at all never gets here, so
nobody is refused for a neighbour's mistake.

While a volume's application runs the next batch gathers, and waits for it. An identical request joins even what runs,
but only while no next batch gathers, which might undo it. A caller that leaves takes nothing back.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from crust import errors, operations, volumes
from crust.blockdriver.controller import io_limit_parameters
from crust.blockdriver.controller.modify_volume import Change, Outcome

_log = logging.getLogger(__name__)

_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""How long a start waits between its tries for guests that are out of reach. Each try has the volume to itself."""

Apply = Callable[[volumes.VolumeId, Change], Awaitable[Outcome]]


class ConflictingChange(errors.OperationPending):
    """Another request for the volume, not answered yet, asks for something else."""

    def __init__(self, volume_id: str, what: str) -> None:
        super().__init__(
            f"{volume_id} is not changed",
            why=f"a request that was there before asks for another {what}",
            hint="retry when that one has been answered",
        )
        self.volume_id = volume_id
        self.what = what


@dataclass(slots=True)
class _CoalescedChange:
    change: Change
    requests: int = 1
    task: asyncio.Task[Outcome] = field(init=False)


class Coalescer:
    """The changes that are asked for in this process. `window_s` is how long the first one waits for others."""

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

    async def ask(self, volume_id: volumes.VolumeId, change: Change) -> Outcome:
        """Make the change with whatever else is asked of the volume; what became of all of it.

        Raises `ConflictingChange`, `operations.OperationInProgress`, `operations.ShuttingDown`, and what `apply`
        raises.
        """
        batch = self._join(volume_id, change)
        return await asyncio.shield(batch.task)

    async def finish(self, volume_ids: Iterable[volumes.VolumeId]) -> None:
        """Make changes of limits that an earlier life wrote down; what cannot be made now, the CO asks for again.

        After a restart of the whole node the proxy and the handlers are there a while later.
        """
        left = list(volume_ids)
        for pause_s in (0.0, *_PAUSES_S):
            await asyncio.sleep(pause_s)
            left = [each for each in left if not await self._finish(each)]
            if not left:
                return

    async def _finish(self, volume_id: volumes.VolumeId) -> bool:
        """Whether there is an answer; none while a guest is out of reach, or another operation has the volume."""
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
        """Let nobody wait for company any more; returns when every batch has ended."""
        self._closing.set()
        while batches := (*self._gathering.values(), *self._applying.values()):
            await asyncio.wait([each.task for each in batches])

    def _join(self, volume_id: volumes.VolumeId, change: Change) -> _CoalescedChange:
        batch = self._gathering.get(volume_id)
        if batch is not None:
            batch.change = _merged(volume_id, batch.change, change)
            batch.requests += 1
            return batch
        applying = self._applying.get(volume_id)
        if applying is not None and _is_part(change, applying.change):
            return applying
        batch = _CoalescedChange(change)
        self._gathering[volume_id] = batch
        batch.task = asyncio.create_task(self._run(volume_id, batch), name=f"changes {volume_id}")
        batch.task.add_done_callback(_seen)
        return batch

    async def _run(self, volume_id: volumes.VolumeId, batch: _CoalescedChange) -> Outcome:
        if self._window_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._window_s)
        while (before := self._applying.get(volume_id)) is not None:
            await asyncio.wait([before.task])
        del self._gathering[volume_id]
        self._applying[volume_id] = batch
        try:
            return await self._operations.run(
                volumes.VolumeKey(self._driver, volume_id),
                "ControllerModifyVolume"
                if batch.change.limits is not None
                else "ControllerExpandVolume",
                batch.change,
                lambda: self._apply(volume_id, batch.change),
            )
        finally:
            del self._applying[volume_id]
            if batch.requests > 1:
                _log.info("made several changes at once", extra={"requests": batch.requests})


def _seen(task: asyncio.Task[Outcome]) -> None:
    """All callers may have left: an error is then nobody's, and is told here."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.debug("a change failed", extra={"error": error})


def _is_part(change: Change, whole: Change) -> bool:
    limits = change.limits is None or (
        whole.limits is not None and set(change.limits) <= set(whole.limits)
    )
    return limits and change.expansion in (None, whole.expansion)


def _merged(volume_id: volumes.VolumeId, gathered: Change, newcomer: Change) -> Change:
    """Both, or `ConflictingChange`."""
    if None not in (gathered.expansion, newcomer.expansion) and (
        gathered.expansion != newcomer.expansion
    ):
        raise ConflictingChange(volume_id, "size")
    return Change(
        limits=_merged_limits(volume_id, gathered.limits, newcomer.limits),
        expansion=gathered.expansion or newcomer.expansion,
    )


def _merged_limits(
    volume_id: volumes.VolumeId,
    gathered: io_limit_parameters.Changes | None,
    newcomer: io_limit_parameters.Changes | None,
) -> io_limit_parameters.Changes | None:
    if gathered is None or newcomer is None:
        return gathered if newcomer is None else newcomer
    limits = dict(gathered)
    for name, value in newcomer:
        if limits.setdefault(name, value) != value:
            raise ConflictingChange(volume_id, name)
    return tuple(sorted(limits.items()))
