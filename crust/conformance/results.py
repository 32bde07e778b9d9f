"""What a run found: per case an outcome, and for each clause that was broken a finding."""

import itertools
import re
from dataclasses import dataclass, field
from typing import Literal

from crust.conformance.catalogue import Case, Clause, Strength
from crust.core import errors

_LINES = 8
_ADDRESS = re.compile(r"<([^<>]*) object at 0x[0-9a-f]+>")
Outcome = Literal["passed", "failed", "warning", "note", "skipped"]
OUTCOMES: dict[Strength, Outcome] = {
    Strength.MUST: "failed",
    Strength.SHOULD: "warning",
    Strength.BEYOND: "note",
}


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was sent, and what came back, as a report shows it, without secrets; both empty before the first call."""

    sent: str = ""
    got: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A clause that was broken, how, and the last call before that."""

    clause: Clause
    why: str
    exchange: Exchange = Exchange()


def explained(error: BaseException) -> str:
    """Why an assertion failed: what it says, without the suite's own objects."""
    text = str(error) or type(error).__name__
    if not isinstance(error, (AssertionError, errors.CrustError)):
        text = f"{type(error).__name__}: {text}"
    lines = [_ADDRESS.sub(r"\1", line) for line in text.splitlines() if line.strip()]
    # a sentence of the case, better than the comparison below it
    if not text.startswith("assert "):
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
        broken = {finding.clause.strength for finding in self.findings}
        for strength in Strength:
            if strength in broken:
                return OUTCOMES[strength]
        return "skipped" if self.skipped else "passed"


@dataclass
class Results:
    """All cases of a run, in the order in which they ended.

    Exit codes: 0 no MUST is broken (strict: nothing is), 1 one is, 2 interrupted, 3 the subject does not answer.
    """

    each: list[Result] = field(default_factory=list)
    exit_code: int = 0

    def numbers(self, *outcomes: Outcome) -> frozenset[str]:
        """The cases that ended so."""
        return frozenset(one.case.number for one in self.each if one.outcome in outcomes)

    @property
    def skipped(self) -> dict[str, str]:
        """The cases that did not run, with the reasons."""
        return {one.case.number: one.skipped for one in self.each if one.outcome == "skipped"}
