"""The proxy's steps around the decisions of `crust.proxy.target`, which are the real functions.

A step fails, is lost, or ends with a kill, as the choices of a run say; what must never happen is a violation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from crust.proxy import target as decisions
from crust.proxy.target import (
    MountStack,
    PublishPlan,
    TargetState,
    UnpublishPlan,
    Wanted,
)
from crust.rpc.status import DriverOutcome, Residue, Undo
from tests.support.faults.choices import Choices
from tests.support.target_model.world import EMPTY, RECORD, WANTED, World


class KilledError(Exception):
    """The process ends here."""


class FailedError(Exception):
    """A step failed; `final`: with a code after which a kubelet forgets the volume."""

    def __init__(self, *, final: bool, conflict: bool = False) -> None:
        super().__init__()
        self.final, self.conflict = final, conflict


@dataclass
class Proxy:
    """The proxy's steps around the decisions."""

    world: World
    choices: Choices
    violations: set[str]
    is_inline: bool = False
    fails: bool = True
    outcome: DriverOutcome = DriverOutcome.NOT_CALLED
    locked: bool = False

    def _set(self, **changes: Any) -> None:
        self.world = replace(self.world, **changes)

    def _step(self, options: list[str]) -> str:
        if not self.fails:
            return options[0]
        chosen = self.choices.of([*options, "kill-before", "kill-after"])
        if chosen == "kill-before":
            raise KilledError
        return chosen

    def _simple(self, change: Callable[[], None] = lambda: None) -> None:
        chosen = self._step(["ok", "fail"])
        if chosen == "fail":
            raise FailedError(final=True)
        change()
        if chosen == "kill-after":
            raise KilledError

    def _guard(self) -> None:
        if self.world.stack is MountStack.CLEAR:
            self._set(stack=MountStack.GUARD)

    def _call_publish(self) -> None:
        if self.world.tool:
            self.violations.add("the driver's publish under an mkfs")
        chosen = self._step(["deferred", "final", "lost", "lost-none", "late", "mounted"])
        if chosen == "mounted" and self.world.held:
            chosen = "final"  # O_EXCL: the host cannot mount it
        if chosen in ("deferred", "lost", "kill-after", "mounted"):
            self._set(driver=True)
        if chosen == "late":
            self._set(late=True)
        if chosen == "kill-after":
            raise KilledError
        answers = {
            "final": DriverOutcome.REFUSED,
            "deferred": DriverOutcome.ANSWERED,
            "mounted": DriverOutcome.ANSWERED,
        }
        self.outcome = answers.get(chosen, DriverOutcome.SILENT)
        if chosen == "mounted":
            self._set(stack=MountStack.BURIED)
        if chosen != "deferred":
            raise FailedError(final=chosen in ("final", "mounted"))

    def _write(self) -> None:
        chosen = self._step(["ok", "fail", "fail-after"])
        if chosen != "fail":
            self._set(entry="same")
            if self.fails and self.choices.of(["unclaimed", "claimed"]) == "claimed":
                self._set(held=True)
        if chosen == "kill-after":
            raise KilledError
        if chosen != "ok":
            raise FailedError(final=True)

    def _make_filesystem(self, began: TargetState) -> None:
        """As `crust.proxy.filesystems.Filesystems.make_if_blank`, where the decision says so."""
        if not decisions.must_be_made(began, EMPTY, frozenset()):
            return
        if self.world.entry:
            self.violations.add("mkfs was started although there is an entry")
        if not self.world.blank:
            return
        chosen = self._step(["ok", "fail", "fail-tool-lives", "kill-tool-lives"])
        if chosen in ("ok", "kill-after"):
            self._set(blank=False)
        if chosen in ("fail-tool-lives", "kill-tool-lives"):
            self._set(tool=True)
        if chosen in ("kill-after", "kill-tool-lives"):
            raise KilledError
        if chosen != "ok":
            raise FailedError(final=True)

    def _call_unpublish(self) -> None:
        if self.world.tool:
            self.violations.add("the driver's unpublish under an mkfs")
        if self.world.held and not self.locked:
            self.violations.add("the driver's unpublish under a live guest")
        chosen = self._step(["ok", "final", "lost", "lost-none"])
        if chosen in ("ok", "lost", "kill-after"):
            stack = MountStack.GUARD if self.world.stack is MountStack.BURIED else self.world.stack
            if stack is MountStack.FOREIGN:
                stack = MountStack.CLEAR
            self._set(driver=False, late=False, stack=stack)
        if chosen == "kill-after":
            raise KilledError
        if chosen != "ok":
            raise FailedError(final=chosen == "final")

    def _unguard(self) -> None:
        if self.world.stack in (MountStack.BURIED, MountStack.FOREIGN):
            raise FailedError(final=True)
        self._simple(lambda: self._set(stack=MountStack.CLEAR))

    def _remove(self) -> None:
        """Lock, driver, hide, unguard, delete: as `crust.proxy.unpublish.Unpublish.remove`."""
        seen = self.world.seen()
        plan = decisions.unpublish_plan(seen, RECORD.key)
        if plan is UnpublishPlan.REFUSE:
            raise FailedError(final=True)
        if seen.entry is not None and self.world.held:
            raise FailedError(final=True)  # the claim lock itself
        self.locked = True
        try:
            self._call_unpublish()
            if plan is UnpublishPlan.DRIVER:
                return
            if self.world.stack in (MountStack.BURIED, MountStack.FOREIGN):
                raise FailedError(final=True)
            if not self.world.entry:
                self._unguard()
                return
            before = self.world.entry
            self._simple(lambda: self._set(entry="gone"))
            try:
                self._unguard()
            except FailedError:
                self._set(entry=before)
                raise
            self._set(entry="")
        finally:
            self.locked = False

    def publish(self) -> str:
        """As `crust.proxy.publish.Publish.defer`; returns the kind of the answer."""
        before, began = self.world, TargetState(stack=MountStack.UNSEEN)
        try:
            began = self._begin()
            self._simple()  # the driver defers
            self._call_publish()
            self._simple()  # the answer, the device, the reservation
            self._make_filesystem(began)
            if began.entry is None:
                self._write()
            answer = "OK"
        except FailedError as error:
            answer = self._failed(error, began)
        self._check_kept(before)
        self._check_answered(answer, before)
        return answer

    def _begin(self) -> TargetState:
        began = self.world.seen()
        plan = decisions.publish_plan(began, self._wanted())
        if plan is PublishPlan.CLEAN_FIRST:
            if self.is_inline:
                self.violations.add("an inline volume was deleted")
            self._remove()
            began = self.world.seen()
            plan = decisions.publish_plan(began, self._wanted())
        if plan is PublishPlan.REFUSE:
            raise FailedError(final=True, conflict=self.world.entry == "args")
        if plan is PublishPlan.DEFER:
            self._simple()  # admission
        self._simple(self._guard)
        return began

    def _failed(self, error: FailedError, began: TargetState) -> str:
        todo = Undo.NOTHING
        if began.stack is not MountStack.UNSEEN:
            todo = decisions.undo_plan(began, self.outcome, is_inline=self.is_inline)
        try:
            if todo is Undo.REMOVE:
                self._unguard()
            if todo is Undo.UNPUBLISH:
                if self.is_inline:
                    self.violations.add("an inline volume was deleted")
                self._remove()
        except FailedError:
            pass
        residue = decisions.residue_of(self.world.seen(), self._wanted())
        if error.final and residue is Residue.NONE:
            return "FINAL"
        return "CONFLICT" if error.conflict and residue is Residue.OTHER else "UNAVAILABLE"

    def _wanted(self) -> Wanted:
        return replace(WANTED, is_inline=self.is_inline)

    def _check_kept(self, before: World) -> None:
        if before.entry and self.world.entry != before.entry:
            self.violations.add("a publish removed an entry that stood before")
        if before.entry == "same" and before.driver and not self.world.driver:
            self.violations.add("a publish undid a driver's publish that stood before")

    def _check_answered(self, answer: str, before: World) -> None:
        now = self.world
        stands = bool(now.entry or now.driver or now.late) or now.stack is not MountStack.CLEAR
        complete = now.entry == "same" and now.driver and now.stack is MountStack.GUARD
        if answer == "OK" and not complete:
            self.violations.add("OK without an entry, a guard, or the driver")
        if now.entry == "same" and before.entry != "same" and now.blank:
            self.violations.add("an entry of a blank device")
        if answer == "FINAL" and before.entry != "vol" and stands:
            self.violations.add("a final code while something stands")

    def unpublish(self) -> str:
        """As a NodeUnpublishVolume of the volume."""
        try:
            self._remove()
        except FailedError:
            return "ERROR"
        now = self.world
        if now.entry or now.driver or now.stack is not MountStack.CLEAR:
            self.violations.add("an unpublish that succeeded left something")
        return "OK"
