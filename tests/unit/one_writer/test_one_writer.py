"""One device has one writer, under every order of calls, deaths and missing answers; and each rule is needed for it.

The model is tests/support/one_writer: `rules` has the decisions (where crust decides in a function, that function),
`node` the steps, `exploration` the invariants. A broken rule shows the shortest run that breaks an invariant.
"""

from dataclasses import replace

import pytest

from crust.core import errors
from crust.host.answers import Answer, NotSeen, Present, Unseen
from crust.proxy.target import PublishPlan, UnpublishPlan
from tests.support.one_writer import rules
from tests.support.one_writer.exploration import explore
from tests.support.one_writer.node import Node
from tests.support.one_writer.rules import Host, Kept, Named, Purpose, Recovery, Rules, refuse_if
from tests.support.one_writer.state import Sandbox, State

TAKEN_AWAY = "the driver takes the device away under a VM or its writes"
NOT_THE_VM = "a process that is not the VM gets the claim"
KILLED = "a VM is killed, and nobody else had its volume"
FORMATTED = "the proxy makes a filesystem under a writer"
YES, NO, UNSEEN = Present(value=True), Present(value=False), Unseen(NotSeen("cannot see it"))


RULES = Rules()


@pytest.mark.parametrize("may_miss", [False, True], ids=["answered", "answers missing"])
def test_rules_hold_in_all_states(*, may_miss: bool) -> None:
    explored = explore(Node(RULES, may_miss=may_miss))
    assert explored.broken is None, str(explored.broken)
    assert explored.states > 10_000


# Each rule is left out.


def _accept(_host: Host) -> None:
    """No question."""


def _give_back_by_users(host: Host) -> None:
    refuse_if(host.users(Purpose.GIVE_BACK))


def _give_back_by_process(host: Host) -> None:
    if host.process() is not None:
        rules.give_back(host)


def _give_back_before_writes_end(host: Host) -> None:
    process = host.process()
    refuse_if(host.users(Purpose.GIVE_BACK) if process is None else process)


def _claim_by_users(host: Host) -> None:
    refuse_if(host.users(Purpose.GUEST))


def _claim_by_process(host: Host) -> None:
    process = host.process()
    if process is not None:
        refuse_if(process)


def _kill_in_doubt(kept: Kept) -> Recovery:
    decided = rules.recover(kept)
    return Recovery.KILL if decided is Recovery.WAIT else decided


LEFT_OUT = {
    "give back asks the process": (replace(RULES, give_back=_give_back_by_users), TAKEN_AWAY),
    "give back asks the users": (replace(RULES, give_back=_give_back_by_process), TAKEN_AWAY),
    "give back asks writes": (replace(RULES, give_back=_give_back_before_writes_end), TAKEN_AWAY),
    "publish asks the users": (replace(RULES, first_publish=_accept), FORMATTED),
    "claim asks the process": (
        replace(RULES, claim=_claim_by_users),
        "two writers: a VM, a VM",
    ),
    "claim asks the users": (
        replace(RULES, claim=_claim_by_process),
        "two writers: a VM, a VM that ended",
    ),
    "host asks the users": (
        replace(RULES, host_publish=_accept),
        "two writers: a VM, the host",
    ),
    "kill only if another is seen": (replace(RULES, recover=_kill_in_doubt), KILLED),
    "claim.json is kept": (replace(RULES, keeps_claim=False), TAKEN_AWAY),
    "a process is pid and start": (replace(RULES, process_has_start=False), NOT_THE_VM),
    "the VM is claim.json's": (replace(RULES, machine_by_claim=False), NOT_THE_VM),
    "another device is a first": (
        replace(RULES, renewal_is_first=False),
        "two writers: a VM, the host",
    ),
    "binds by the kernel": (
        replace(RULES, binds_by_kernel=False),
        "two writers: a VM, a raw pod",
    ),
    "users are writes in flight": (
        replace(RULES, users_count_in_flight=False),
        FORMATTED,
    ),
    "code: an entry is no first publish": (
        replace(RULES, publish_plan=lambda _seen, _wanted: PublishPlan.DEFER),
        TAKEN_AWAY,
    ),
    "code: a live claim refuses": (
        replace(RULES, unpublish_plan=lambda _seen, _key: UnpublishPlan.REMOVE),
        TAKEN_AWAY,
    ),
    "code: the entry reserves": (
        replace(RULES, conflict=lambda _new, _rows: None),
        "two writers: a VM, the host",
    ),
}
"""Each rule of `Rules`: the rules without it, and the invariant that breaks first."""


@pytest.mark.parametrize("may_miss", [False, True], ids=["answered", "answers missing"])
@pytest.mark.parametrize("rule", LEFT_OUT)
def test_rule_left_out_breaks_an_invariant(rule: str, *, may_miss: bool) -> None:
    left_out, why = LEFT_OUT[rule]
    broken = explore(Node(left_out, may_miss=may_miss)).broken
    assert broken is not None
    assert may_miss or broken.why == why, str(broken)


def test_missing_answer_taken_for_no_breaks_an_invariant() -> None:
    mistaken = replace(RULES, refuses_unseen=False)
    assert explore(Node(mistaken)).broken is None
    assert explore(Node(mistaken, may_miss=True)).broken is not None


def test_missing_answer_of_a_process_alone_breaks_an_invariant() -> None:
    """The promise: the VM will open the device, and only its process shows it."""

    def mistaken(host: Host) -> None:
        process = host.process()
        if process is not None:
            refuse_if(rules.no_if_unseen(process))
            refuse_if(host.in_flight())
        else:
            refuse_if(host.users(Purpose.GIVE_BACK))

    broken = explore(Node(replace(RULES, give_back=mistaken), may_miss=True)).broken
    assert broken is not None
    assert broken.why == TAKEN_AWAY


def test_give_back_searches_no_processes_if_claim_json_names_one() -> None:
    """The search costs milliseconds for each unpublish of a node."""

    class Claimed:
        def __init__(self, process: Answer[bool]) -> None:
            self._process = process

        def process(self) -> Answer[bool]:
            return self._process

        def users(self, _purpose: Purpose) -> Answer[bool]:
            raise AssertionError("all open files are searched")

        def in_flight(self) -> Answer[bool]:
            return NO

    rules.give_back(Claimed(NO))
    for process in (YES, UNSEEN):
        with pytest.raises(errors.CrustError):
            rules.give_back(Claimed(process))


def test_give_back_that_never_accepts_is_stuck() -> None:
    """Progress is an invariant too: to refuse everything is no solution."""

    def refuse(_host: Host) -> None:
        refuse_if(YES)

    broken = explore(Node(replace(RULES, give_back=refuse))).broken
    assert broken is not None
    assert broken.why == "stuck"


# A VM without a keeper (H-46).


@pytest.mark.parametrize(
    ("process", "named", "another", "decided"),
    [
        (YES, Named.OWN, NO, Recovery.CLAIM),
        (YES, Named.OWN, YES, Recovery.KILL),
        (YES, Named.OWN, UNSEEN, Recovery.WAIT),
        (YES, Named.LATER, NO, Recovery.KILL),
        (YES, Named.LATER, UNSEEN, Recovery.KILL),
        (YES, Named.NONE, NO, Recovery.WAIT),
        (YES, Named.NONE, YES, Recovery.KILL),
        (NO, Named.OWN, NO, Recovery.ENDED),
        (NO, Named.LATER, YES, Recovery.ENDED),
        (UNSEEN, Named.OWN, NO, Recovery.WAIT),
        (UNSEEN, Named.LATER, YES, Recovery.WAIT),
    ],
)
def test_recovery_kills_beside_another_holder_or_later_claim_alone(
    process: Answer[bool], named: Named, another: Answer[bool], decided: Recovery
) -> None:
    assert rules.recover(Kept(process, named, another)) is decided


@pytest.mark.parametrize("later", [Sandbox("ended"), Sandbox("up"), Sandbox("A", hold="A")])
def test_vm_beside_a_later_claim_is_killed(later: Sandbox) -> None:
    """No run leads here under the rules; a node that ran without them may be here, and the VM's cache is stale."""
    alone = Sandbox("A", socket=True)
    lock = 2 if later.hold else 0
    steps = Node(RULES).steps(
        State(entry="A", lock=lock, claim=2, boxes=(alone, later), in_guest=True)
    )
    killed = [step for step in steps if step.text.startswith("recover 1")]
    assert [(step.text, step.wrong) for step in killed] == [("recover 1: killed", "")]
