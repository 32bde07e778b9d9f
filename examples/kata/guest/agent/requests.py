"""Which requests may begin: slots for each volume and container, and one run for equal requests.

A request that hangs (a disk that does not answer) keeps its thread, and its host sends it again. So:

    reserved   stop and thaw requests need no slot: they begin also while others hang
    slots      SLOTS per volume or container: a volume that hangs stops no other
    joining    an equal request that runs already answers all callers, WAITERS at most: statistics of a hung volume
               use one slot, not one each minute

A request that changes a volume is joined only as long as no other change was requested after it: a thaw must not be
answered by an earlier thaw if a freeze came in between. Input of a container and starts are never joined.
"""

from __future__ import annotations

import json
import threading

from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SLOTS = 8
WAITERS = 8
_ALL_SLOTS = 256
RESERVED = frozenset(("thaw", "container.kill", "shutdown"))
_QUESTIONS = frozenset(("usage", "health", "container.list"))
CHANGES = frozenset(("mount", "own", "unmount", "grow", "freeze", "thaw", "shutdown"))


class Run:
    """A request that runs, with the ids of all requests that wait for its answer."""

    def __init__(self, request: str, operation: str, args: object) -> None:
        self.operation = operation
        self.args = args
        self.subject = subject(args)
        self.key = (operation, json.dumps(args, sort_keys=True))
        self.waiters = [request]


class Requests:
    """The requests that run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._joinable: dict[tuple[str, str], Run] = {}
        self._taken: dict[str, int] = {}

    def begin(self, request: str, operation: str, args: object) -> Run | None:
        """The run to start; None if the request waits for an equal one. Faults: exhausted."""
        run = Run(request, operation, args)
        with self._lock:
            running = self._joinable.get(run.key)
            if running is not None:
                self._join(running, request)
                return None
            if operation not in RESERVED:
                self._take_slot(run)
            self._note(run)
            return run

    def end(self, run: Run) -> list[str]:
        """The ids that wait for the answer of a run that has ended."""
        with self._lock:
            if self._joinable.get(run.key) is run:
                del self._joinable[run.key]
            if run.operation not in RESERVED:
                self._taken[run.subject] -= 1
                if not self._taken[run.subject]:
                    del self._taken[run.subject]
            return run.waiters

    def _join(self, running: Run, request: str) -> None:
        if len(running.waiters) >= WAITERS:
            raise protocol.Fault(
                "exhausted", f"{WAITERS} callers wait for {running.operation} {running.subject}"
            )
        running.waiters.append(request)

    def _take_slot(self, run: Run) -> None:
        taken = self._taken.get(run.subject, 0)
        if taken >= SLOTS or sum(self._taken.values()) >= _ALL_SLOTS:
            raise protocol.Fault(
                "exhausted", f"{taken} requests of {run.subject or 'the guest'} have not ended"
            )
        self._taken[run.subject] = taken + 1

    def _note(self, run: Run) -> None:
        if run.operation in CHANGES:
            self._joinable = {
                key: running
                for key, running in self._joinable.items()
                if running.subject != run.subject or running.operation not in CHANGES
            }
        if run.operation in CHANGES | _QUESTIONS:
            self._joinable[run.key] = run


def subject(args: Any) -> str:
    """The volume or container that a request is about; "" for the whole guest."""
    name = (args.get("volume") or args.get("container")) if isinstance(args, dict) else None
    return name if isinstance(name, str) else ""
