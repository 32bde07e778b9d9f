"""The decisions about one target, checked with every failure and every kill.

The decisions are the real functions of `crust.proxy.target`; the model around them is tests/support/target_model.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from crust.core import volumes
from crust.core.volumes import HandlerFeature
from crust.handoff.entry import Entry, UnknownHandoffFile
from crust.proxy import target as decisions
from crust.proxy.target import (
    MountStack,
    PublishPlan,
    TargetRow,
    TargetState,
    UnpublishPlan,
)
from crust.rpc.status import DriverOutcome, Residue, Undo
from tests.support.target_model.exploration import explore
from tests.support.target_model.world import ARGS, EMPTY, ENTRIES, RECORD, WANTED

FORMATTED = replace(EMPTY, format=None)
IMAGE = volumes.NetworkImage("c", "pool", "", "image", ("192.0.2.1",), "user")


@pytest.mark.parametrize("is_inline", [False, True])
def test_every_failure_and_kill_leaves_a_right_world(*, is_inline: bool) -> None:
    worlds, runs, violations = explore(is_inline=is_inline)
    assert violations == set()
    assert worlds > 15
    assert runs > 500


def _is_clear_of_entry(seen: TargetState, _: object) -> bool:
    return seen.entry is None


def _is_unreadable(seen: TargetState, _: object) -> bool:
    return seen.entry is not None and seen.entry.record is None


def _is_of_other_arguments(seen: TargetState, _: object) -> bool:
    return seen.entry is not None and seen.entry.record == ARGS


def _has_outcome_without_entry(
    outcome: DriverOutcome, began: TargetState, given: DriverOutcome
) -> bool:
    return given is outcome and began.entry is None


def _stack(stack: MountStack, seen: TargetState, _: object) -> bool:
    return seen.stack is stack


UNSEEN, BURIED = partial(_stack, MountStack.UNSEEN), partial(_stack, MountStack.BURIED)
WRONG = Callable[[TargetState, Any], bool]

MUTANTS: dict[str, tuple[str, WRONG, object]] = {
    "undo: what stood before is undone": (
        "undo_plan",
        lambda began, outcome: began.entry is not None and outcome is DriverOutcome.ANSWERED,
        Undo.UNPUBLISH,
    ),
    **{
        f"undo: the guard alone goes after {outcome}": (
            "undo_plan",
            partial(_has_outcome_without_entry, outcome),
            Undo.REMOVE,
        )
        for outcome in DriverOutcome
    },
    "residue: a guard alone is nothing": ("residue_of", _is_clear_of_entry, Residue.NONE),
    "residue: other arguments are nothing": ("residue_of", _is_of_other_arguments, Residue.NONE),
    "residue: an unreadable entry is nothing": ("residue_of", _is_unreadable, Residue.NONE),
    "residue: nothing while a tool runs": ("residue_of", UNSEEN, Residue.NONE),
    "publish: an unreadable entry again": ("publish_plan", _is_unreadable, PublishPlan.DEFER),
    "publish: what was mounted over a guard stays": (
        "publish_plan",
        lambda seen, _: seen.stack is MountStack.BURIED and seen.entry is None,
        PublishPlan.DEFER,
    ),
    "publish: a lost guard refuses the retry": (
        "publish_plan",
        lambda seen, _: seen.stack is MountStack.CLEAR and seen.entry is not None,
        PublishPlan.REFUSE,
    ),
    "publish: begins although foreign": (
        "publish_plan",
        partial(_stack, MountStack.FOREIGN),
        PublishPlan.DEFER,
    ),
    "publish: begins although unseen": ("publish_plan", UNSEEN, PublishPlan.DEFER),
    "unpublish: a guard is the driver's": (
        "unpublish_plan",
        _is_clear_of_entry,
        UnpublishPlan.DRIVER,
    ),
    "unpublish: a buried guard is refused": ("unpublish_plan", BURIED, UnpublishPlan.REFUSE),
    "unpublish: begins while a tool runs": ("unpublish_plan", UNSEEN, UnpublishPlan.CLEAN),
    "must_be_made: a repeated publish runs mkfs": (
        "must_be_made",
        lambda began, _: began.entry is not None,
        True,
    ),
    "must_be_made: nobody makes the filesystem": ("must_be_made", lambda *_: True, False),
}
"""A decision that is wrong: for what it is outcome then, and what it answers."""


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_decision_violates_a_guarantee(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function, applies, answer = MUTANTS[name]
    decide = getattr(decisions, function)

    def wrong(seen: TargetState, other: Any, *rest: Any, **options: Any) -> object:
        return answer if applies(seen, other) else decide(seen, other, *rest, **options)

    monkeypatch.setattr(decisions, function, wrong)
    assert any(explore(is_inline=inline)[2] for inline in (False, True))


@pytest.mark.parametrize(
    ("mount", "features", "entry", "made"),
    [
        (EMPTY, frozenset(), None, True),
        (replace(EMPTY, readonly=True), frozenset(), None, True),
        (EMPTY, frozenset({HandlerFeature.FORMAT}), None, False),
        (EMPTY, frozenset(), ENTRIES["same"], False),
        (replace(EMPTY, encryption=volumes.Encryption.LUKS), frozenset(), None, False),
        (replace(EMPTY, source=IMAGE), frozenset(), None, False),
        (FORMATTED, frozenset(), None, False),
        (FORMATTED, frozenset({HandlerFeature.GROW}), None, False),
    ],
)
def test_proxy_makes_only_the_filesystem_that_no_guest_makes(
    mount: volumes.DeferredMount,
    features: frozenset[HandlerFeature],
    entry: Entry | None,
    *,
    made: bool,
) -> None:
    began = TargetState(entry, MountStack.GUARD)
    assert decisions.must_be_made(began, mount, features) is made


def test_failed_publish_of_inline_volume_never_unpublishes_it() -> None:
    for stack, outcome in itertools.product(MountStack, DriverOutcome):
        todo = decisions.undo_plan(TargetState(stack=stack), outcome, is_inline=True)
        assert todo is not Undo.UNPUBLISH
    assert (
        decisions.publish_plan(
            TargetState(stack=MountStack.BURIED), replace(WANTED, is_inline=True)
        )
        is PublishPlan.REFUSE
    )


def test_what_cannot_be_looked_at_is_neither_free_nor_removed() -> None:
    unseen = TargetState(stack=MountStack.UNSEEN, problem=MemoryError())
    assert decisions.publish_plan(unseen, WANTED) is PublishPlan.REFUSE
    assert decisions.residue_of(unseen, WANTED) is Residue.EXISTS
    assert decisions.unpublish_plan(unseen, RECORD.key) is UnpublishPlan.REFUSE


@pytest.mark.spec("H-41")
def test_publish_over_bare_guard_waits_for_an_unreadable_entry() -> None:
    """Only a publish that has its record is a retry: the entry may reserve the device of every other one."""
    new = TargetRow.of(RECORD.target.text, key=RECORD.key)
    unreadable = TargetRow("unreadable", entry=ENTRIES["bad"])
    bare = replace(new, stack=MountStack.GUARD)
    refusal = decisions.conflict(new, [bare, unreadable])
    assert refusal is not None
    assert refusal.error_name == "ReservedByUnreadableEntry"
    assert decisions.conflict(new, [replace(bare, entry=ENTRIES["same"]), unreadable]) is None


def test_name_that_no_entry_has_blocks_no_publish() -> None:
    stray = Entry("notes", "/e/notes", None, UnknownHandoffFile("/e/notes"))
    new = TargetRow.of(RECORD.target.text, key=RECORD.key)
    assert decisions.conflict(new, [TargetRow("notes", entry=stray)]) is None


def test_lost_guard_of_a_read_only_volume_had_no_group() -> None:
    """The files of a read-only volume are not changed (H-12), so nothing is refused for it."""
    for readonly in (False, True):
        record = RECORD.replaced(replace(RECORD.mount, group=None, readonly=readonly))
        entry = replace(ENTRIES["same"], record=record)
        row = TargetRow.of(record.target.text, key=record.key, entry=entry)
        assert decisions.lost_its_group(row) is not readonly


def test_failed_publish_below_another_mount_keeps_no_row() -> None:
    row = TargetRow.of(RECORD.target.text, key=RECORD.key)
    assert decisions.row_after_failure(row, TargetState(stack=MountStack.FOREIGN)) is None
