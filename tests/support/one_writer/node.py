"""The steps of a node: calls, the ends of VMs, and faults, each under the rules of `rules`.

A call is one step, but an unpublish is three: lock and questions, the driver's call, the removal. A fault may come
between any two steps: a killed keeper, bridge or proxy, an entry that is moved by hand, a lost claim.json, a pid that
is used again, a VM that ends before its writes do. With `may_miss` each question may have no answer.

Between a claim and the VM's open of the device, lock and claim.json are the only evidence. In that time nobody moves
the entry away, and only one of the two is lost.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.entry import Entry
from crust.host.answers import Answer, NotSeen, Present, Unseen
from crust.host.block.device_sets import DeviceSet
from crust.proxy.target import (
    MountStack,
    PublishPlan,
    TargetRow,
    TargetState,
    UnpublishPlan,
    Wanted,
)
from tests.support.one_writer.rules import (
    Decision,
    Kept,
    Named,
    Purpose,
    Recovery,
    Rules,
    no_if_unseen,
)
from tests.support.one_writer.state import DEVICES, UNPUBLISH, Sandbox, State
from tests.support.records import records

_UNSEEN = Unseen(NotSeen("cannot see it"))
_REQUEST = "1" * 64
_RECORD = records.a_record().replaced(request=_REQUEST)
_WANTED = Wanted(
    _RECORD.key,
    _RECORD.target,
    volumes.MountAccess(fs_type="ext4"),
    (),
    readonly=False,
    digest=_REQUEST,
)
_RAW = volumes.VolumeKey(_RECORD.key.driver, volumes.VolumeId("raw"))
_CLAIM = claims.Claim("box", "kata", claims.State.MOUNTED, "", 7, None, live=True)
_DEVICES = {
    name: DeviceSet.alone(volumes.DeviceIdentity(7, number, number))
    for number, name in enumerate(DEVICES, 1)
}


class Step(NamedTuple):
    """One step. `wrong` names the invariant that the step itself breaks."""

    text: str
    after: State
    is_fault: bool = False
    wrong: str = ""


Steps = Iterator[Step]


class _Truth(NamedTuple):
    """The host about one device."""

    process: bool | None
    writes: bool
    in_flight: bool
    is_held: bool
    is_bound: bool


@dataclass(frozen=True, slots=True)
class _Host:
    """The host as it answers: the truth, or nothing."""

    truth: _Truth
    answered: tuple[bool, bool, bool]
    """Whether process, users and writes in flight are answered."""
    rules: Rules

    def process(self) -> Answer[bool] | None:
        if self.truth.process is None:
            return None
        return _told(self.rules, truth=self.truth.process, is_answered=self.answered[0])

    def users(self, purpose: Purpose) -> Answer[bool]:
        truth = self.truth
        is_used = truth.writes or (truth.in_flight and self.rules.users_count_in_flight)
        if purpose is not Purpose.GIVE_BACK:
            is_used = is_used or truth.is_held
        if purpose is Purpose.GUEST and self.rules.binds_by_kernel:
            is_used = is_used or truth.is_bound
        return _told(self.rules, truth=is_used, is_answered=self.answered[1])

    def in_flight(self) -> Answer[bool]:
        return _told(self.rules, truth=self.truth.in_flight, is_answered=self.answered[2])


def _told(rules: Rules, *, truth: bool, is_answered: bool) -> Answer[bool]:
    answer: Answer[bool] = Present(truth) if is_answered else _UNSEEN
    return answer if rules.refuses_unseen else no_if_unseen(answer)


class _Outcomes(NamedTuple):
    """The ways in which a decision may end."""

    accepts: bool
    refuses: bool


_ALL_ANSWERED = (True, True, True)


@cache
def _outcomes(decision: Decision, truth: _Truth, rules: Rules, *, may_miss: bool) -> _Outcomes:
    """The ends of a decision: with `may_miss`, with each set of missing answers."""
    accepted = []
    for process, users, in_flight in _answered(may_miss=may_miss):
        try:
            decision(_Host(truth, (process, users, in_flight), rules))
        except errors.CrustError:
            accepted.append(False)
        else:
            accepted.append(True)
    return _Outcomes(any(accepted), not all(accepted))


def _answered(*, may_miss: bool) -> Iterable[tuple[bool, bool, bool]]:
    return product((True, False), (True, False), (True, False)) if may_miss else [_ALL_ANSWERED]


@dataclass(frozen=True)
class Node:
    """A node under these rules."""

    rules: Rules
    may_miss: bool = False

    def steps(self, state: State) -> Steps:
        """All steps from a state."""
        for call in self._calls:
            yield from call(state)

    @cached_property
    def _calls(self) -> tuple[Callable[[State], Steps], ...]:
        return (
            self._publish,
            self._renew,
            self._claim,
            self._unpublish,
            self._host_publish,
            self._raw_publish,
            self._recover,
            self._lives,
            self._faults,
        )

    # The questions.

    def _runs(self, box: Sandbox) -> bool:
        """Whether the VM's process runs; by the pid alone another process counts."""
        return box.lives or (box.vm == "reused" and not self.rules.process_has_start)

    def _asked(self, decision: Decision, state: State, device: str) -> _Outcomes:
        truth = _Truth(
            process=self._runs(state.box(state.claim)) if state.claim else None,
            writes=any("ended" not in writer for writer in state.writers(device)),
            in_flight=any(box.in_flight == device for box in state.boxes),
            is_held=state.is_held(device),
            is_bound=device == "B" and state.raw != "",
        )
        return _outcomes(decision, truth, self.rules, may_miss=self.may_miss)

    def _seen(self, state: State) -> TargetState:
        return _seen(has_entry=state.entry != "", is_live=state.lock in (1, 2))

    def _may_have(self, key: volumes.VolumeKey, device: str, state: State) -> bool:
        """By the proxy's table: the volume and the device of the entry are reserved."""
        if not state.entry:
            return True
        return _conflict(self.rules, key, device, state.entry) is None

    # The calls.

    def _publish(self, state: State) -> Steps:
        if state.lock or not state.bridge:
            return
        if self.rules.publish_plan(self._seen(state), _WANTED) is not PublishPlan.DEFER:
            return
        if self._asked(self.rules.first_publish, state, "A").accepts:
            wrong = "the proxy makes a filesystem under a writer" if state.writers("A") else ""
            after = state._replace(entry="A", claim=0)
            yield Step("publish, deferred: OK, device A", after, wrong=wrong)

    def _renew(self, state: State) -> Steps:
        """The driver answers B to a repeated publish. The entry of a live claim stays as it is."""
        if state.entry != "A" or state.lock:
            return
        if self.rules.publish_plan(self._seen(state), _WANTED) is not PublishPlan.RENEW:
            return
        renewed = state._replace(entry="B", claim=0)
        if not self.rules.renewal_is_first or (
            self._asked(self.rules.give_back, state, "A").accepts
            and self._asked(self.rules.first_publish, renewed, "B").accepts
        ):
            yield Step("publish again: OK, device B", renewed)

    def _claim(self, state: State) -> Steps:
        if not state.bridge or not state.entry or state.lock:
            return
        for number, box in _numbered(state):
            if box.vm != "up" or box.granted or box.socket:
                continue
            asked = self._asked(self.rules.claim, state, state.entry)
            if asked.refuses and not self.rules.keeps_claim:
                yield Step(f"sandbox {number} claims: refused", state._replace(claim=0))
            if asked.accepts:
                claimed = box._replace(hold=state.entry, granted=state.entry, socket=True)
                after = state._replace(lock=number, claim=number, in_guest=True)
                yield Step(f"sandbox {number} claims: OK", after.with_box(number, claimed))

    def _unpublish(self, state: State) -> Steps:
        if state.lock != UNPUBLISH:
            if state.entry:
                yield from self._begin_unpublish(state)
        elif not state.driver_done:
            wrong = ""
            if any(state.entry in (box.vm, box.in_flight) for box in state.boxes):
                wrong = "the driver takes the device away under a VM or its writes"
            done = state._replace(driver_done=True)
            yield Step("unpublish: the driver answers OK", done, wrong=wrong)
            yield Step("unpublish: the driver refuses", state._replace(lock=0))
        else:
            after = state._replace(lock=0, driver_done=False, entry="", claim=0)
            yield Step("unpublish: OK", after)

    def _begin_unpublish(self, state: State) -> Steps:
        plan = self.rules.unpublish_plan(self._seen(state), _RECORD.key)
        if plan is not UnpublishPlan.REMOVE:
            return
        asked = self._asked(self.rules.give_back, state, state.entry)
        if asked.refuses and not self.rules.keeps_claim:
            yield Step("unpublish: refused (in use)", state._replace(claim=0))
        if asked.accepts:
            yield Step("unpublish: nobody uses it", state._replace(lock=UNPUBLISH, claim=0))

    def _host_publish(self, state: State) -> Steps:
        """Our driver mounts A. Only a volume that a guest may have written costs a question."""
        if state.host:
            yield Step("host unpublish: OK", state._replace(host=False))
        elif self._may_have(_RECORD.key, "A", state) and not state.is_held("A"):
            is_asked = state.in_guest
            if not is_asked or self._asked(self.rules.host_publish, state, "A").accepts:
                yield Step("host publish: OK, A is mounted writable", state._replace(host=True))

    def _raw_publish(self, state: State) -> Steps:
        if state.raw == "" and self._may_have(_RAW, "B", state):
            if self._asked(self.rules.host_publish, state, "B").accepts:
                yield Step("raw publish: OK, B is bound", state._replace(raw="bound"))
        elif state.raw == "bound":
            yield Step("the raw volume's pod opens B", state._replace(raw="open"))
            yield Step("raw unpublish: OK", state._replace(raw=""))
        elif state.raw == "open":
            yield Step("the raw volume's pod closes B", state._replace(raw="bound"))

    # The bridge, when no keeper answers at a socket.

    def _recover(self, state: State) -> Steps:
        if not state.bridge or state.lock == UNPUBLISH:
            return
        for number, box in _numbered(state):
            if box.socket and not box.hold:
                for kept in self._kept(state, number):
                    yield from self._recovered(state, number, self.rules.recover(kept))

    def _kept(self, state: State, number: int) -> Iterator[Kept]:
        box = state.box(number)
        runs = self._runs(box) or (box.vm == "reused" and not self.rules.machine_by_claim)
        named = {0: Named.NONE, number: Named.OWN}.get(state.claim, Named.LATER)
        another = _has_another(state, number)
        for of_process, of_another, _ in _answered(may_miss=self.may_miss):
            process = _told(self.rules, truth=runs, is_answered=of_process)
            yield Kept(process, named, _told(self.rules, truth=another, is_answered=of_another))

    def _recovered(self, state: State, number: int, recovery: Recovery) -> Steps:
        box = state.box(number)
        if recovery is Recovery.ENDED:
            yield Step(
                f"recover {number}: it has ended",
                state.with_box(number, box._replace(socket=False)),
            )
        elif recovery is Recovery.KILL:
            is_right = state.claim not in (0, number) or _has_another(state, number)
            wrong = "" if is_right else "a VM is killed, and nobody else had its volume"
            yield Step(f"recover {number}: killed", _ended(state, number), wrong=wrong)
        elif recovery is Recovery.CLAIM and state.entry and not state.lock:
            wrong = "" if box.lives else "a process that is not the VM gets the claim"
            again = state.with_box(number, box._replace(hold=state.entry))
            yield Step(f"recover {number}: claimed again", again._replace(lock=number), wrong=wrong)

    # What VMs do, and faults.

    def _lives(self, state: State) -> Steps:
        for number, box in _numbered(state):
            if box.vm == "" and state.bridge and state.entry:
                yield Step(f"VM {number} starts", state.with_box(number, box._replace(vm="up")))
            if box.granted and box.vm == "up":
                opened = box._replace(vm=box.granted, granted="")
                yield Step(f"VM {number} opens {box.granted}", state.with_box(number, opened))
            if box.lives:
                yield Step(f"VM {number} ends", _ended(state, number))
            if box.in_flight:
                arrived = state.with_box(number, box._replace(in_flight=""))
                yield Step(f"the writes of VM {number} end", arrived)
        if not state.bridge:
            yield Step("the bridge starts", state._replace(bridge=True))

    def _faults(self, state: State) -> Steps:
        for number, box in _numbered(state):
            if box.hold and not (_is_creating(box) and state.claim != number):
                without = state.with_box(number, box._replace(hold="")).unlocked(number)
                yield Step(f"both keepers of {number} are killed", without, is_fault=True)
            if box.vm in DEVICES:
                text = f"VM {number} is killed before its writes end"
                ended = _ended(state, number)
                late = ended.box(number)._replace(in_flight=box.vm)
                yield Step(text, ended.with_box(number, late), is_fault=True)
            if box.vm == "ended":
                reused = state.with_box(number, box._replace(vm="reused"))
                yield Step(f"the pid of VM {number} is used again", reused, is_fault=True)
        if state.bridge:
            yield Step("the bridge is killed", state._replace(bridge=False), is_fault=True)
        if state.lock == UNPUBLISH:
            killed = state._replace(lock=0, driver_done=False)
            yield Step("the proxy is killed in the unpublish", killed, is_fault=True)
        else:
            yield from _damage(state)


def _is_creating(box: Sandbox) -> bool:
    """Whether the VM will open the device."""
    return box.granted != "" and box.vm == "up"


def _damage(state: State) -> Steps:
    if state.entry and not state.moved and not any(map(_is_creating, state.boxes)):
        moved = state._replace(entry="", lock=0, claim=0, moved=True)
        yield Step("the entry is moved away by hand", moved, is_fault=True)
    is_only_evidence = any(_is_creating(box) and not box.hold for box in state.boxes)
    if state.claim and not state.lost and not is_only_evidence:
        lost = state._replace(claim=0, lost=True)
        yield Step("claim.json is lost, or names no process", lost, is_fault=True)


def _numbered(state: State) -> Iterator[tuple[int, Sandbox]]:
    return enumerate(state.boxes, 1)


def _ended(state: State, number: int) -> State:
    box = state.box(number)
    ended = Sandbox("ended", socket=box.socket, in_flight=box.in_flight)
    return state.with_box(number, ended).unlocked(number)


def _has_another(state: State, number: int) -> bool:
    """Whether another holder has the volume of a VM."""
    if state.lock not in (0, number):
        return True
    if not state.entry:
        return False
    box = state.box(number)
    others = state.writers(state.entry)
    if box.vm == state.entry:
        others.remove("a VM")
    return bool(others) or state.is_held(state.entry)


@cache
def _seen(*, has_entry: bool, is_live: bool) -> TargetState:
    """The proxy's observation of the target. The guard is there in all states: another part mounts it again."""
    if not has_entry:
        return TargetState(None, MountStack.GUARD)
    entry = Entry(_RECORD.digest, "/e", _RECORD)
    return TargetState(replace(entry, claim=_CLAIM) if is_live else entry, MountStack.GUARD)


@cache
def _conflict(
    rules: Rules, key: volumes.VolumeKey, device: str, reserved: str
) -> errors.CrustError | None:
    entry = Entry(_RECORD.digest, "/e", _RECORD)
    row = TargetRow.of("/entry", key=_RECORD.key, devices=_DEVICES[reserved], entry=entry)
    new = TargetRow.of("/other", key=key, devices=_DEVICES[device])
    return rules.conflict(new, [row])
