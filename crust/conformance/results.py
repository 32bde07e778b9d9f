"""What a run found: per case an outcome, and for each clause that was broken a finding."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from crust.conformance.case import Case, Clause, Strength
from crust.conformance.orchestrator.exchange import NONE, Exchange

_LINES = 8
_ADDRESS = re.compile(r"<([^<>]*) object at 0x[0-9a-f]+>")
Outcome = Literal["passed", "failed", "warning", "note", "skipped"]
OUTCOMES: dict[Strength, Outcome] = {
    Strength.MUST: "failed",
    Strength.SHOULD: "warning",
    Strength.BEYOND: "note",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A clause that was broken, how, and the last call before that."""

    clause: Clause
    why: str
    exchange: Exchange = NONE


def explained(error: BaseException) -> str:
    """Why an assertion failed: what it says, without the suite's own objects."""
    text = str(error) or type(error).__name__
    if not isinstance(error, AssertionError):
        text = f"{type(error).__name__}: {text}"
    lines = [_ADDRESS.sub(r"\1", line) for line in text.splitlines() if line.strip()]
    if not text.startswith(
        "assert "
    ):  # a sentence of the case, better than the comparison below it
        lines = list(itertools.takewhile(lambda line: not line.startswith("assert "), lines))
    return "\n".join(lines[:_LINES]) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Result:
    """One case. `skipped` is the reason, empty if the case ran."""

    case: Case
    findings: tuple[Finding, ...] = ()
    skipped: str = ""
    seconds: float = 0.0

    @property
    def outcome(self) -> Outcome:
        """The worst of its findings."""
        broken = {each.clause.strength for each in self.findings}
        for strength in Strength:
            if strength in broken:
                return OUTCOMES[strength]
        return "skipped" if self.skipped else "passed"


@dataclass
class Results:
    """All cases of a run, in the order in which they ended."""

    each: list[Result] = field(default_factory=list)

    def numbers(self, *outcomes: Outcome) -> frozenset[str]:
        """The cases that ended so."""
        return frozenset(one.case.number for one in self.each if one.outcome in outcomes)

    def skipped(self) -> dict[str, str]:
        """The cases that did not run, with the reasons."""
        return {one.case.number: one.skipped for one in self.each if one.outcome == "skipped"}


def ranges(numbers: Iterable[str]) -> str:
    """`C-101..C-104, C-110`."""
    runs: list[list[int]] = []
    for number in sorted(int(each.removeprefix("C-")) for each in numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"C-{run[0]:03d}" if len(run) == 1 else f"C-{run[0]:03d}..C-{run[-1]:03d}" for run in runs
    )
