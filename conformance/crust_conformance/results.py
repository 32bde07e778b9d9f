"""The results of a run: an outcome for each case, and a finding for each broken clause."""

import itertools
import linecache
import re
import traceback
from dataclasses import dataclass, field
from typing import Literal

from crust.core import errors
from crust_conformance import comparisons
from crust_conformance.catalogue import Case, Clause, Strength

_LINES = 8
_COMPARED = "assert "
"""How pytest's explanation of a comparison begins."""
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
    """The message of a failed assertion; without one what must hold, and the compared values in words."""
    text = str(error).strip().removesuffix(":")
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    elif not isinstance(error, (AssertionError, errors.CrustError)):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    lines = [_ADDRESS.sub(r"\1", line) for line in text.splitlines() if line.strip()]
    # the case's own sentence stands before the comparison
    own = list(itertools.takewhile(lambda line: not line.startswith(_COMPARED), lines))
    if own:
        return "\n".join(own[:_LINES])
    found = lines[0].removeprefix(_COMPARED) if lines else ""
    held = f"this must hold: {_asserted(error)}"
    return f"{held}\n{found}" if found.startswith(comparisons.BEGIN) else held


def _asserted(error: BaseException) -> str:
    """The expression of the failed assertion, as the case has it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    last = frame.end_lineno or frame.lineno or 0
    lines = linecache.getlines(frame.filename)[(frame.lineno or 1) - 1 : last]
    return " ".join(line.strip() for line in lines).removeprefix("assert ")


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
