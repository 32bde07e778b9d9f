"""What sandboxes do with the volumes, as events: claimed, mounted, failed, released.

Each entry that a scan has read is compared with the last claim that was reported of it. A claim is released when its
lock is free: after that an unpublish succeeds, and with claim.json removed before the lock is free it would not yet.
"""

import logging
from collections.abc import Callable

from crust import volumes
from crust.handoff.claims import Claim, State
from crust.handoff.entry import Entry
from crust.handoff.record import Record
from crust.proxy.deferrals.events import Event, Events

_KINDS = {State.MOUNTED: "mounted", State.ERROR: "failed"}
"""The events for states of a claim, beside "claimed"."""

_log = logging.getLogger(__name__)


class ClaimEvents:
    """Reports the claims of entries to `events`, and to the log."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._claimed: dict[str, tuple[Record, Claim]] = {}
        """What was reported last of each entry with a live claim, by digest."""

    def report(self, entry: Entry) -> None:
        """Report what has changed since the entry was reported last."""
        claim = entry.claim
        if entry.record is None or entry.claim_error is not None:
            return
        if claim is not None and claim.live and not claim.sandbox_id:
            return  # claim.json is not there yet, or not any more: it is about to change
        _, had = self._claimed.get(entry.digest, (None, None))
        has = claim if entry.live else None
        is_other = had is None or has is None or had.sandbox_id != has.sandbox_id
        if is_other:
            self._released(
                entry.digest, claim.error if claim is not None and not claim.live else ""
            )
        if has is None:
            return
        self._claimed[entry.digest] = entry.record, has
        if is_other:
            self._emit("claimed", entry.record, has)
        if has.state in _KINDS and (had is None or is_other or had.state is not has.state):
            self._emit(_KINDS[has.state], entry.record, has, has.error)

    def report_gone(self, is_there: Callable[[volumes.TargetPath], bool]) -> None:
        """Report the end of claims whose entry is gone: it is unpublished, which no claim survives."""
        for digest, (record, _) in tuple(self._claimed.items()):
            if not is_there(record.target):
                self._released(digest)

    def _released(self, digest: str, why: str = "") -> None:
        record, had = self._claimed.pop(digest, (None, None))
        if record is not None and had is not None:
            self._emit("released", record, had, why)

    def _emit(self, kind: str, record: Record, claim: Claim, why: str = "") -> None:
        target = record.target.text
        _log.info(kind, extra={"target": target, "sandbox": claim.sandbox_id})
        message = f"sandbox {claim.sandbox_id}{f': {why}' if why else ''}"
        self._events.emit(Event(kind, target, record.handler, message))
