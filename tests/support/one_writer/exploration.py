"""All states of a node, each reached by the shortest run: which run breaks an invariant, and which one is stuck.

The invariants: a device has one writer; a driver takes no device away under a VM or its writes; no process but the VM
gets the claim; no VM is killed while nobody else has its volume. Progress: from each state, without further faults,
everything can be given back.
"""

from collections import deque
from dataclasses import dataclass, field

from tests.support.one_writer.node import Node
from tests.support.one_writer.state import DEVICES, State

LIMIT = 500_000
"""More states are a mistake in the model."""


@dataclass(frozen=True, slots=True)
class Broken:
    """An invariant, and the shortest run that breaks it."""

    why: str
    run: tuple[str, ...]

    def __str__(self) -> str:
        return "\n  ".join((self.why, *self.run))


@dataclass(frozen=True, slots=True)
class Exploration:
    """The states that were reached, and the first break."""

    states: int
    broken: Broken | None


@dataclass
class _Reached:
    """The states so far, each with the step that led there first."""

    before: dict[State, tuple[State, str] | None] = field(default_factory=dict)
    back: dict[State, list[State]] = field(default_factory=dict)
    """The states from which one step without a fault leads here."""

    def run(self, state: State) -> list[str]:
        texts: list[str] = []
        step = self.before[state]
        while step is not None:
            state, text = step
            texts.append(text)
            step = self.before[state]
        return texts[::-1]

    def stuck(self) -> State | None:
        """The first state from which nothing leads to the end without a fault."""
        todo = [state for state in self.before if state.is_given_back]
        ending = set(todo)
        while todo:
            new = [state for state in self.back.get(todo.pop(), ()) if state not in ending]
            ending.update(new)
            todo += new
        return next((state for state in self.before if state not in ending), None)


def explore(node: Node) -> Exploration:
    """Explore until the first break, or to the end."""
    start = State()
    reached = _Reached({start: None})
    todo = deque([start])
    while todo:
        state = todo.popleft()
        for text, after, is_fault, wrong in node.steps(state):
            why = wrong or _two_writers(after)
            if why:
                run = (*reached.run(state), text)
                return Exploration(len(reached.before), Broken(why, run))
            if not is_fault:
                reached.back.setdefault(after, []).append(state)
            if after not in reached.before:
                reached.before[after] = (state, text)
                todo.append(after)
        assert len(reached.before) < LIMIT
    stuck = reached.stuck()
    broken = None if stuck is None else Broken("stuck", tuple(reached.run(stuck)))
    return Exploration(len(reached.before), broken)


def _two_writers(state: State) -> str:
    for device in DEVICES:
        writers = state.writers(device)
        if len(writers) > 1:
            return f"two writers: {', '.join(sorted(writers))}"
    return ""
