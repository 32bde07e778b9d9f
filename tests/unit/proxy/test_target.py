"""The decisions about one target, checked with every failure and every kill (a model of the steps around them).

The decisions are the real functions of `crust.proxy.target`; the model plays the proxy's steps, the driver, a sandbox
and a kill at each step, in a world of one volume and one target.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from crust.core import errors, volumes
from crust.handoff.claims import Claim, State
from crust.handoff.entry import Entry, UnknownHandoffFile
from crust.proxy import target as decisions
from crust.proxy.target import (
    Feature,
    PublishPlan,
    Seen,
    Stack,
    Target,
    Undo,
    UnpublishPlan,
    Wanted,
)
from crust.rpc.status import Asked, Residue
from tests.support.faults.choices import Choices
from tests.support.records import records

RECORD = records.a_record().but(request="1" * 64)
OTHERS = RECORD.but(volume_id="vol-other")
WANTED = Wanted(
    RECORD.key,
    RECORD.target,
    volumes.MountAccess(fs_type="ext4"),
    (),
    readonly=True,
    digest="1" * 64,
)
ARGS = RECORD.but(request="2" * 64)
HELD = Claim("box", "kata", State.MOUNTED, "", 7, None, live=True)
EMPTY = replace(RECORD.mount, format=volumes.GuestFormat(), readonly=False)
FORMATTED = replace(EMPTY, format=None)
IMAGE = volumes.NetworkImage("c", "pool", "", "image", ("192.0.2.1",), "user")
ENTRIES = {
    "same": Entry(RECORD.digest, "/e", RECORD.but(replace(RECORD.mount, readonly=True))),
    "args": Entry(RECORD.digest, "/e", ARGS),
    "vol": Entry(RECORD.digest, "/e", OTHERS),
    "bad": Entry(RECORD.digest, "/e", None, errors.Corrupt("damaged")),
}


@dataclass(frozen=True)
class World:
    """The disk, the kernel, the driver and the sandbox."""

    entry: str = ""
    """A key of `ENTRIES`, or "gone": hidden, and not deleted yet."""
    stack: Stack = Stack.CLEAR
    driver: bool = False
    """Whether the driver has the volume published."""
    held: bool = False
    late: bool = False
    """Whether the driver is still at work on a publish that nobody waits for."""
    blank: bool = True
    """Whether the volume, which was created empty, has no filesystem; the handler's guests make none."""
    tool: bool = False
    """Whether mkfs runs, and nobody waits for it."""

    def seen(self) -> Seen:
        if self.tool:
            return Seen(stack=Stack.UNSEEN, problem=errors.PeerUnavailable("a tool runs"))
        entry = ENTRIES.get(self.entry)
        if entry is not None and self.held:
            entry = replace(entry, claim=HELD)
        return Seen(entry, self.stack)


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
    asked: Asked = Asked.NOT_CALLED
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
        if self.world.stack is Stack.CLEAR:
            self._set(stack=Stack.GUARD)

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
        answers = {"final": Asked.REFUSED, "deferred": Asked.ANSWERED, "mounted": Asked.ANSWERED}
        self.asked = answers.get(chosen, Asked.SILENT)
        if chosen == "mounted":
            self._set(stack=Stack.BURIED)
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

    def _make_filesystem(self, began: Seen) -> None:
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
            stack = Stack.GUARD if self.world.stack is Stack.BURIED else self.world.stack
            if stack is Stack.FOREIGN:
                stack = Stack.CLEAR
            self._set(driver=False, late=False, stack=stack)
        if chosen == "kill-after":
            raise KilledError
        if chosen != "ok":
            raise FailedError(final=chosen == "final")

    def _unguard(self) -> None:
        if self.world.stack in (Stack.BURIED, Stack.FOREIGN):
            raise FailedError(final=True)
        self._simple(lambda: self._set(stack=Stack.CLEAR))

    def _remove(self) -> None:
        """Lock, driver, hide, unguard, delete: as `crust.proxy.unpublish.Unpublish.remove`."""
        seen = self.world.seen()
        plan = decisions.begin_unpublish(seen, RECORD.key)
        if plan is UnpublishPlan.REFUSE:
            raise FailedError(final=True)
        if seen.entry is not None and self.world.held:
            raise FailedError(final=True)  # the claim lock itself
        self.locked = True
        try:
            self._call_unpublish()
            if plan is UnpublishPlan.DRIVER:
                return
            if self.world.stack in (Stack.BURIED, Stack.FOREIGN):
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
        before, began = self.world, Seen(stack=Stack.UNSEEN)
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

    def _begin(self) -> Seen:
        began = self.world.seen()
        plan = decisions.begin_publish(began, self._wanted())
        if plan is PublishPlan.CLEAN_FIRST:
            if self.is_inline:
                self.violations.add("an inline volume was deleted")
            self._remove()
            began = self.world.seen()
            plan = decisions.begin_publish(began, self._wanted())
        if plan is PublishPlan.REFUSE:
            raise FailedError(final=True, conflict=self.world.entry == "args")
        if plan is PublishPlan.DEFER:
            self._simple()  # admission
        self._simple(self._guard)
        return began

    def _failed(self, error: FailedError, began: Seen) -> str:
        undo = Undo.KEEP
        if began.stack is not Stack.UNSEEN:
            undo = decisions.undo(began, self.asked, is_inline=self.is_inline)
        try:
            if undo is Undo.UNGUARD:
                self._unguard()
            if undo is Undo.TAKE_BACK:
                if self.is_inline:
                    self.violations.add("an inline volume was deleted")
                self._remove()
        except FailedError:
            pass
        stands = decisions.stands(self.world.seen(), self._wanted())
        if error.final and stands is Residue.NONE:
            return "FINAL"
        return "CONFLICT" if error.conflict and stands is Residue.OTHER else "UNAVAILABLE"

    def _wanted(self) -> Wanted:
        return replace(WANTED, is_inline=self.is_inline)

    def _check_kept(self, before: World) -> None:
        if before.entry and self.world.entry != before.entry:
            self.violations.add("a publish removed an entry that stood before")
        if before.entry == "same" and before.driver and not self.world.driver:
            self.violations.add("a publish undid a driver's publish that stood before")

    def _check_answered(self, answer: str, before: World) -> None:
        now = self.world
        stands = bool(now.entry or now.driver or now.late) or now.stack is not Stack.CLEAR
        complete = now.entry == "same" and now.driver and now.stack is Stack.GUARD
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
        if now.entry or now.driver or now.stack is not Stack.CLEAR:
            self.violations.add("an unpublish that succeeded left something")
        return "OK"


def _started_again(world: World) -> World:
    """A start finishes the removal of an entry that was hidden."""
    if world.entry != "gone":
        return world
    stack = Stack.CLEAR if world.stack is Stack.GUARD else world.stack
    return replace(world, entry="", stack=stack)


def _check_settles(world: World, violations: set[str], *, is_inline: bool) -> None:
    """With nothing failing any more, an unpublish clears all once the sandbox ends, and a publish succeeds."""
    if world.entry in ("args", "vol", "bad"):
        return
    if world.tool:  # it ends by itself
        world = replace(world, tool=False, blank=False)
    quiet = Proxy(replace(world, held=False), Choices(), set(), is_inline, fails=False)
    if quiet.unpublish() != "OK" or quiet.violations:
        violations.add("an unpublish does not converge")
    if world.stack is Stack.FOREIGN or (world.entry == "same" and world.stack is Stack.BURIED):
        return
    if is_inline and world.stack is Stack.BURIED:
        return  # only a CO deletes it
    settled = replace(world, driver=world.driver or world.late, late=False)
    if Proxy(settled, Choices(), set(), is_inline, fails=False).publish() != "OK":
        violations.add("a publish does not converge")


def _runs(start: World, call: str, violations: set[str], *, is_inline: bool) -> Iterator[World]:
    """All runs of a call; yields the worlds that they leave."""
    script: list[int] | None = []
    while script is not None:
        choices = Choices(script)
        proxy = Proxy(start, choices, violations, is_inline)
        try:
            getattr(proxy, call)()
        except KilledError:
            proxy.world = _started_again(proxy.world)
        _check_settles(proxy.world, violations, is_inline=is_inline)
        yield proxy.world
        script = choices.following()


def _others(world: World) -> Iterator[World]:
    """What happens without a call."""
    if world.late:
        yield replace(world, late=False, driver=True)
    if world.tool:
        yield replace(world, tool=False, blank=False)
        yield replace(world, tool=False)
    if world.entry == "same":
        yield replace(world, held=not world.held)
        if world.stack is Stack.GUARD:
            yield replace(world, stack=Stack.CLEAR)
        row = Target(RECORD.digest, entry=world.seen().entry, stack=world.stack)
        if decisions.needs_guard(row) and row.stack is Stack.CLEAR:
            yield replace(world, stack=Stack.GUARD)


def explore(*, is_inline: bool = False) -> tuple[int, int, set[str]]:
    """All worlds from an empty one and from some strange ones: their number, that of runs, the violations."""
    violations: set[str] = set()
    worlds: set[World] = set()
    todo = [
        World(),
        World(stack=Stack.FOREIGN, driver=True),
        World(entry="args", stack=Stack.GUARD, driver=True),
        World(entry="vol", stack=Stack.GUARD),
        World(entry="bad", stack=Stack.GUARD, driver=True),
    ]
    runs = 0
    while todo:
        world = todo.pop()
        if world in worlds:
            continue
        worlds.add(world)
        for call in ("publish", "unpublish"):
            left = list(_runs(world, call, violations, is_inline=is_inline))
            runs += len(left)
            todo += left
        todo += _others(world)
    return len(worlds), runs, violations


@pytest.mark.parametrize("is_inline", [False, True])
def test_every_failure_and_kill_leaves_a_right_world(*, is_inline: bool) -> None:
    worlds, runs, violations = explore(is_inline=is_inline)
    assert violations == set()
    assert worlds > 15
    assert runs > 500


def _is_clear_of_entry(seen: Seen, _: object) -> bool:
    return seen.entry is None


def _is_unreadable(seen: Seen, _: object) -> bool:
    return seen.entry is not None and seen.entry.record is None


def _is_of_other_arguments(seen: Seen, _: object) -> bool:
    return seen.entry is not None and seen.entry.record == ARGS


def _asked_without_entry(asked: Asked, began: Seen, given: Asked) -> bool:
    return given is asked and began.entry is None


def _stack(stack: Stack, seen: Seen, _: object) -> bool:
    return seen.stack is stack


UNSEEN, BURIED = partial(_stack, Stack.UNSEEN), partial(_stack, Stack.BURIED)
WRONG = Callable[[Seen, Any], bool]
MUTANTS: dict[str, tuple[str, WRONG, object]] = {
    "undo: what stood before is undone": (
        "undo",
        lambda began, asked: began.entry is not None and asked is Asked.ANSWERED,
        Undo.TAKE_BACK,
    ),
    **{
        f"undo: the guard alone goes after {asked}": (
            "undo",
            partial(_asked_without_entry, asked),
            Undo.UNGUARD,
        )
        for asked in Asked
    },
    "stands: a guard alone is nothing": ("stands", _is_clear_of_entry, Residue.NONE),
    "stands: other arguments are nothing": ("stands", _is_of_other_arguments, Residue.NONE),
    "stands: an unreadable entry is nothing": ("stands", _is_unreadable, Residue.NONE),
    "stands: nothing while a tool runs": ("stands", UNSEEN, Residue.NONE),
    "publish: an unreadable entry again": ("begin_publish", _is_unreadable, PublishPlan.DEFER),
    "publish: what was mounted over a guard stays": (
        "begin_publish",
        lambda seen, _: seen.stack is Stack.BURIED and seen.entry is None,
        PublishPlan.DEFER,
    ),
    "publish: a lost guard refuses the retry": (
        "begin_publish",
        lambda seen, _: seen.stack is Stack.CLEAR and seen.entry is not None,
        PublishPlan.REFUSE,
    ),
    "publish: begins although foreign": (
        "begin_publish",
        partial(_stack, Stack.FOREIGN),
        PublishPlan.DEFER,
    ),
    "publish: begins although unseen": ("begin_publish", UNSEEN, PublishPlan.DEFER),
    "unpublish: a guard is the driver's": (
        "begin_unpublish",
        _is_clear_of_entry,
        UnpublishPlan.DRIVER,
    ),
    "unpublish: a buried guard is refused": ("begin_unpublish", BURIED, UnpublishPlan.REFUSE),
    "unpublish: begins while a tool runs": ("begin_unpublish", UNSEEN, UnpublishPlan.CLEAN),
    "must_be_made: a repeated publish runs mkfs": (
        "must_be_made",
        lambda began, _: began.entry is not None,
        True,
    ),
    "must_be_made: nobody makes the filesystem": ("must_be_made", lambda *_: True, False),
}
"""A decision that is wrong: for what it is asked then, and what it answers."""


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_decision_violates_a_guarantee(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function, applies, answer = MUTANTS[name]
    decide = getattr(decisions, function)

    def wrong(seen: Seen, other: Any, *rest: Any, **options: Any) -> object:
        return answer if applies(seen, other) else decide(seen, other, *rest, **options)

    monkeypatch.setattr(decisions, function, wrong)
    assert any(explore(is_inline=inline)[2] for inline in (False, True))


@pytest.mark.parametrize(
    ("mount", "features", "entry", "made", "filled"),
    [
        (EMPTY, frozenset(), None, True, False),
        (replace(EMPTY, readonly=True), frozenset(), None, True, False),
        (EMPTY, frozenset({Feature.FORMAT}), None, False, False),
        (EMPTY, frozenset(), ENTRIES["same"], False, False),
        (replace(EMPTY, encryption=volumes.Encryption.LUKS), frozenset(), None, False, False),
        (replace(EMPTY, source=IMAGE), frozenset(), None, False, False),
        (FORMATTED, frozenset(), None, False, True),
        (FORMATTED, frozenset({Feature.GROW}), None, False, False),
        (FORMATTED, frozenset(), ENTRIES["same"], False, False),
        (replace(FORMATTED, readonly=True), frozenset(), None, False, False),
        (replace(FORMATTED, fs_type="f2fs"), frozenset(), None, False, False),
        (replace(FORMATTED, encryption=volumes.Encryption.LUKS), frozenset(), None, False, False),
        (replace(FORMATTED, source=IMAGE), frozenset(), None, False, False),
    ],
)
def test_proxy_makes_or_checks_only_what_no_guest_does(
    mount: volumes.DeferredMount,
    features: frozenset[Feature],
    entry: Entry | None,
    *,
    made: bool,
    filled: bool,
) -> None:
    began = Seen(entry, Stack.GUARD)
    assert decisions.must_be_made(began, mount, features) is made
    assert decisions.must_be_filled(began, mount, features) is filled


def test_failed_publish_of_inline_volume_never_unpublishes_it() -> None:
    for stack, asked in itertools.product(Stack, Asked):
        undo = decisions.undo(Seen(stack=stack), asked, is_inline=True)
        assert undo is not Undo.TAKE_BACK
    assert (
        decisions.begin_publish(Seen(stack=Stack.BURIED), replace(WANTED, is_inline=True))
        is PublishPlan.REFUSE
    )


def test_what_cannot_be_looked_at_is_neither_free_nor_removed() -> None:
    unseen = Seen(stack=Stack.UNSEEN, problem=MemoryError())
    assert decisions.begin_publish(unseen, WANTED) is PublishPlan.REFUSE
    assert decisions.stands(unseen, WANTED) is Residue.EXISTS
    assert decisions.begin_unpublish(unseen, RECORD.key) is UnpublishPlan.REFUSE


@pytest.mark.spec("H-41")
def test_publish_over_bare_guard_waits_for_an_unreadable_entry() -> None:
    """Only a publish that has its record is a retry: the entry may reserve the device of every other one."""
    new = Target.of(RECORD.target.text, key=RECORD.key)
    unreadable = Target("unreadable", entry=ENTRIES["bad"])
    bare = replace(new, stack=Stack.GUARD)
    refusal = decisions.conflict(new, [bare, unreadable])
    assert refusal is not None
    assert refusal.error_name == "ReservedByUnreadableEntry"
    assert decisions.conflict(new, [replace(bare, entry=ENTRIES["same"]), unreadable]) is None


def test_name_that_no_entry_has_blocks_no_publish() -> None:
    stray = Entry("notes", "/e/notes", None, UnknownHandoffFile("/e/notes"))
    new = Target.of(RECORD.target.text, key=RECORD.key)
    assert decisions.conflict(new, [Target("notes", entry=stray)]) is None
