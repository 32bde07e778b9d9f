"""The results of a run: an outcome for each case, and a finding for each broken clause."""

import itertools
import re
from dataclasses import dataclass, field
from typing import Literal

from crust.core import errors
from crust_conformance.catalogue import Case, Clause, Strength

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
    """A request and its answer for a report, without secrets; both empty before the first call."""

    sent: str = ""
    got: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken clause, the reason, and the last call before it."""

    clause: Clause
    why: str
    exchange: Exchange = Exchange()


def explained(error: BaseException) -> str:
    """The message of a failed assertion, without the suite's own objects."""
    text = str(error) or type(error).__name__
    if not isinstance(error, (AssertionError, errors.CrustError)):
        text = f"{type(error).__name__}: {text}"
    lines = [_ADDRESS.sub(r"\1", line) for line in text.splitlines() if line.strip()]
    # the case's own sentence is better than the comparison below it
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

    Exit codes: 0 no MUST is broken (strict: no clause), 1 a MUST is broken, 2 interrupted, 3 the subject is away.
    """

    cases: list[Result] = field(default_factory=list)
    exit_code: int = 0

    def numbers(self, *outcomes: Outcome) -> frozenset[str]:
        """The numbers of the cases with these outcomes."""
        return frozenset(result.case.number for result in self.cases if result.outcome in outcomes)

    @property
    def skipped(self) -> dict[str, str]:
        """The cases that did not run, with the reasons."""
        skipped = [result for result in self.cases if result.outcome == "skipped"]
        return {result.case.number: result.skipped for result in skipped}
