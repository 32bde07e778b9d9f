"""The looks keep the table current, report the runtimes' claims as events, and mount lost guards again.

Runtimes write the claims, so the proxy learns of them by looking; an event of the watch means "look again". A guard
is lost when somebody unmounts it, or when the mounts of a container end with it. Then a runtime that misses the entry
would write to the node's disk. So an operation at the target mounts the guard again, as the last look has seen it.
The proxy reports as its health: a guard that it cannot mount or whose group nobody knows, a mount over a guard, a
guard without an entry, and a device that is gone or changed.

The mounts are listed only when they have changed, and a device is checked when its entry is read.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from crust.core import errors, operations, volumes
from crust.core.supervised import supervised
from crust.handoff import entry as handoff_entries
from crust.handoff import watch
from crust.handoff.claims import Claim, State
from crust.host.process import workers
from crust.proxy.table import Entries, Event
from crust.proxy.target import (
    Guard,
    MountStack,
    TargetRow,
    group_unknown,
    lost_its_group,
    needs_guard,
)

_PAUSE_FACTOR = 10
"""After a look, pause for this many times its duration. Hints coalesce meanwhile."""

_MAX_PAUSE_S = 2.0

_LATE_S = 30.0
"""A look that takes longer is a problem of the proxy's health: a list that hangs ends all looks."""

_HANG_S = 5.0
"""How long a look waits for a guard mount, or for a device. The look reports a call that hangs, and goes on."""

_LOOKS = "looks at the handoff directory"
_HANGS = errors.PeerUnavailable.named(
    "LookHangs",
    "the handoff directory and the mounts are not looked at",
    why=f"a system call of the last look has not returned within {_LATE_S:g} s",
)
_KINDS = {State.MOUNTED: "mounted", State.ERROR: "failed"}
"""The events for states of a claim, beside "claimed"."""

_log = logging.getLogger(__name__)


class Reconciler:
    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._table = entries.table
        self._targets = entries.targets
        self._reader = handoff_entries.DirectoryReader(entries.store.layout)
        self._looking = asyncio.Lock()
        self._must_list = True
        """Whether the last list of the mounts left out some rows, which were newer."""

    async def look(self) -> frozenset[str]:
        """Look once; returns the names of the entries that were read."""
        async with self._looking:
            must_list = self._targets.mounts_changed() or self._must_list
            began = self._table.clock
            known_names = {row.name for row in self._table.rows()}
            report_late = partial(self._entries.health.report, _LOOKS, _HANGS, is_fatal=False)
            late = asyncio.get_running_loop().call_later(_LATE_S, report_late)
            try:
                names, rows, stacks = await workers.run(self._read, known_names, must_list)
            finally:
                late.cancel()
            self._entries.health.report(_LOOKS, None)
            newer = self._table.merge(began, names, rows, stacks)
            self._must_list = bool(newer) and must_list
            self._reader.forget(newer)
            current = frozenset(rows.keys() - set(newer))
            for name in current:
                self._report_claim(name)
            for row in self._table.take_ended():  # an unpublish ends the claim and the problems
                for part in row.problems:
                    self._entries.health.report(f"{part} of {row.path}", None, is_fatal=False)
                    self._entries.events.emit(Event("healthy", row.path, message=part))
                if row.reported is not None:
                    self._emit(claim_events(row.handler or "", row.path, row.reported, None))
            await asyncio.gather(*(self._look_at_device(rows[name]) for name in current))
            for row in self._table.rows():
                if not row.busy:
                    self._entries.report_problem(row.name, "entry", _entry_problem(row))
            return current

    @asynccontextmanager
    async def following(
        self,
        *,
        end: Callable[[errors.CrustError], None] | None = None,
        rescan_s: float | None = None,
    ) -> AsyncIterator[None]:
        """Look after each hint of the watch while the block runs.

        If looks keep failing, `end` is called: a proxy that sees no claims and no changes must be restarted.
        """
        root, health = self._entries.store.root, self._entries.health
        async with watch.Watch(root, rescan_s=rescan_s, kinds=watch.TOUCHES) as hints:

            async def follow() -> None:
                async for _ in hints:
                    began_s = time.monotonic()
                    await self.mend(await self.look())
                    took_s = time.monotonic() - began_s
                    await asyncio.sleep(min(_PAUSE_FACTOR * took_s, _MAX_PAUSE_S))

            async with supervised("watch of the handoff directory", follow, health, end=end):
                yield

    def _read(
        self,
        known_names: Set[str],
        must_list: bool,  # noqa: FBT001 - of a thread
    ) -> tuple[Set[str], Mapping[str, TargetRow], Mapping[str, MountStack] | None]:
        look = self._reader.look()
        rows = {name: self._entries.row_of(entry) for name, entry in look.entries.items()}
        for name, row in rows.items():
            if row.record is not None:
                rows[name] = replace(row, guard=self._targets.guard_at(row.record.target))
        lists = must_list or not rows.keys() <= known_names
        return look.names, rows, self._targets.stacks() if lists else None

    async def _look_at_device(self, row: TargetRow) -> None:
        """Report whether the device is the published one. A device that hangs keeps one thread, and no other look."""
        try:
            problem = await self._entries.operations.look(
                ("device", row.name),
                lambda: self._device_problem(row),
                timeout_s=_HANG_S,
                shown=f"the device of {row.path}",
            )
        except workers.NoWorkerFree:
            return
        except operations.SystemCallTimedOut as hangs:
            problem = hangs
        self._entries.report_problem(row.name, "device", problem)

    def _device_problem(self, row: TargetRow) -> errors.CrustError | None:
        record = row.record
        if record is None or record.image is not None:
            return None  # only the cluster can look for an image, and only with the key of its user
        try:
            identity = self._entries.devices.identify(record.device)
            why = f"the kernel has {identity} there"
        except errors.CrustError as error:
            identity, why = None, error.what
        if identity == record.identity:
            return None
        return errors.NotReady.named(
            "PublishedDeviceChanged",
            f"the volume at {record.target} cannot be used by a runtime any more",
            why=f"its device {record.device} was {record.identity}, and {why}",
        )

    async def mend(self, names: Set[str]) -> None:
        """Restore lost guards, or report the reason; the last failure is retried last, if `names` has its entry."""
        lost = []
        for row in self._table.rows():
            if row.busy:
                continue
            if not needs_guard(row):
                self._entries.report_problem(row.name, "guard mount", None)
            elif "guard mount" not in row.problems or row.name in names:
                lost.append(row)
        for row in sorted(lost, key=lambda row: ("guard mount" in row.problems, row.path)):
            if not await self._restore(row):
                return  # the next look restores the others: one look waits for one hanging mount

    async def _restore(self, row: TargetRow) -> bool:
        """Mount the guard again; returns False if that hangs."""
        target = volumes.TargetPath(row.path)
        try:
            was_lost = await self._entries.operations.run(
                target,
                "restore of the guard mount",
                None,
                lambda: workers.run(self._mount, target, row.guard),
                limit_s=_HANG_S,
            )
        except (operations.OperationInProgress, operations.ShuttingDown, workers.NoWorkerFree):
            return True  # the operation that runs there mounts it, or the next look does
        except operations.OperationOverdue:
            hangs = errors.PeerUnavailable.named(
                "RestoreHangs",
                f"the guard mount of {target} is not restored",
                why=f"the system call has not returned within {_HANG_S:g} s",
            )
            self._entries.report_problem(row.name, "guard mount", hangs)
            return False
        except errors.CrustError as error:
            self._entries.report_problem(row.name, "guard mount", error)
            return True
        current = self._table.at_name(row.name)
        if current is None:
            return True
        self._table.note(replace(current, stack=MountStack.GUARD))
        self._entries.report_problem(row.name, "guard mount", None)
        if was_lost:
            _log.warning("guard mount restored", extra={"target": row.path})
            self._entries.events.emit(Event("guard-restored", row.path))
            if lost_its_group(current):
                self._entries.report_problem(row.name, "group", group_unknown(row.path))
        return True

    def _mount(self, target: volumes.TargetPath, guard: Guard | None) -> bool:
        """Mount the guard, if it is lost; returns whether it was. Blocks."""
        entry = self._entries.store.read(target)
        seen = self._targets.look(target)
        if entry is None or entry.record is None or seen.stack is MountStack.GUARD:
            return False
        self._targets.restore_guard(target, guard)
        return True

    def _report_claim(self, name: str) -> None:
        row = self._table.at_name(name)
        if row is None or row.entry is None or row.record is None or row.entry.claim_error:
            return
        claim = row.entry.claim
        if claim is not None and claim.live and not claim.sandbox_id:
            return  # claim.json is not there yet, or not any more: it is about to change
        self._emit(claim_events(row.record.handler, row.path, row.reported, claim))
        live = claim if claim is not None and claim.live else None
        if live != row.reported:
            self._table.note(replace(row, reported=live))

    def _emit(self, events: Iterable[Event]) -> None:
        for event in events:
            _log.info(event.kind, extra={"target": event.target_path, "claim": event.message})
            self._entries.events.emit(event)


def _entry_problem(row: TargetRow) -> errors.CrustError | None:
    if row.entry is not None or row.stack not in (MountStack.GUARD, MountStack.BURIED):
        return None
    volume = f"volume {row.key}" if row.key is not None else "a volume"
    return errors.NotReady.named(
        "EntryMissing",
        f"a guard mount is on {row.path}, and the handoff directory has no entry for it",
        why=f"a publish of {volume} has not succeeded, or somebody moved its entry away; then a sandbox may have it",
    )


def claim_events(
    handler: str, target: str, had: Claim | None, has: Claim | None
) -> Iterable[Event]:
    """The events between the claim that was reported last, `had`, and the claim that was read now, `has`.

    A claim is released when its lock is free: after that an unpublish succeeds, and with claim.json removed before
    the lock is free it would not yet.
    """

    def event(kind: str, claim: Claim, why: str) -> Event:
        return Event(
            kind, target, handler, f"sandbox {claim.sandbox_id}{f': {why}' if why else ''}"
        )

    live = has if has is not None and has.live else None
    is_other = had is None or live is None or had.sandbox_id != live.sandbox_id
    if had is not None and is_other:
        yield event("released", had, has.error if has is not None and live is None else "")
    if live is None:
        return
    if is_other:
        yield event("claimed", live, "")
    if live.state in _KINDS and (had is None or is_other or had.state is not live.state):
        yield event(_KINDS[live.state], live, live.error)
