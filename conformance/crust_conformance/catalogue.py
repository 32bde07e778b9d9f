"""The catalogue: each case's rule, clauses and needs, read from the tables of cases.md beside this file.

Only the page has a case's words. The case itself is a function whose name has the
number: `test_c221_…` for drivers, `test_r101_…` for runtimes; a test compares page and functions in both directions.
A case has at least one clause. The strongest is the case's own: a failed assertion breaks it. Assertions of a weaker
clause are in a block `with co.should():` or `with co.beyond():`, and the case continues after them.

MUST stands for MUST, REQUIRED and SHALL, which decide whether the tested program is compliant; SHOULD for SHOULD and
RECOMMENDED. `beyond` stands for rules that the specification leaves open: a CO's practice, or crust's own contract.

An operator chooses cases by their numbers: `C-101`, `c-101`, `101`, a range `C-100..C-199`, several with commas; or
by a regular expression that matches their number and rule.
"""

import enum
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from crust.core import errors

_FUNCTION = re.compile(r"test_([cr])(\d{3})_")
_ROW = re.compile(r"\| [CR]-\d{3} \|")
_PATTERN = re.compile(r"(?:[cr]-?)?(\d{1,3})(?:\.\.(?:[cr]-?)?(\d{1,3}))?", re.IGNORECASE)
_CELLS = re.compile(r"(?<!\\)\|")


class Strength(enum.StrEnum):
    """The strength of a clause; the strongest first."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    BEYOND = "beyond"


@dataclass(frozen=True, slots=True)
class Clause:
    """A sentence of the specification: its section or its numbers, and its gist."""

    strength: Strength
    section: str
    gist: str = ""

    def __str__(self) -> str:
        """The text on the page and in a report."""
        return f"{self.strength} · {self.section}" + (f": {self.gist}" if self.gist else "")


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the page. `needs` are names of capabilities."""

    number: str
    rule: str
    clauses: tuple[Clause, ...]
    needs: tuple[str, ...]

    @property
    def strength(self) -> Strength:
        """The strength of its own clause, which is the first one."""
        return self.clauses[0].strength

    def clause(self, strength: Strength) -> Clause:
        """The clause of this strength. Raises LookupError if the case has none."""
        for clause in self.clauses:
            if clause.strength is strength:
                return clause
        raise LookupError(f"{self.number} has no clause of strength {strength}")


def number_of(function: str) -> str:
    """The number in a function's name: C-221, R-101; empty for a function that is no case."""
    match = _FUNCTION.match(function)
    return f"{match[1].upper()}-{match[2]}" if match else ""


def cases(kind: str) -> Mapping[str, Case]:
    """The cases for drivers ("C") or for runtimes ("R"), by number."""
    return {number: case for number, case in _read().items() if number.startswith(kind)}


@functools.cache
def _read() -> Mapping[str, Case]:
    page = Path(__file__).with_name("cases.md").read_text(encoding="utf-8")
    rows = filter(_ROW.match, page.splitlines())
    return {case.number: case for case in map(_case, rows)}


def _case(row: str) -> Case:
    cells = [cell.strip().replace("\\|", "|") for cell in _CELLS.split(row)]
    _, number, rule, clauses, needs, _ = cells
    names = tuple(name.strip("`") for name in needs.split(", ") if name)
    return Case(number, rule, tuple(_clause(text, rule) for text in clauses.split("<br>")), names)


def _clause(text: str, rule: str) -> Clause:
    """`MUST · Section: gist`, or `MUST: gist` of the section that the rule begins with."""
    words, _, gist = text.partition(": ")
    strength, _, section = words.partition(" · ")
    return Clause(Strength(strength), section or rule.partition(": ")[0], gist)


def chosen(
    cases: Mapping[str, Case],
    only: Iterable[str],
    skip: Iterable[str],
    focus: Iterable[str] = (),
) -> frozenset[str]:
    """The cases that `only` names and `focus` matches (without them all), except those of `skip`.

    Raises `errors.InvalidRequest` for an unknown case: a misspelt number would run no case, and pass.
    """
    included = [_matching(cases, part) for part in _parts(only)]
    excluded = [_matching(cases, part) for part in _parts(skip)]
    focused = [_focused(cases, pattern) for pattern in focus]
    named = set(cases if not included else set().union(*included))
    return frozenset(
        named.intersection(*[set().union(*focused)] * bool(focused)).difference(*excluded)
    )


def _focused(cases: Mapping[str, Case], pattern: str) -> set[str]:
    try:
        words = re.compile(pattern)
    except re.error as error:
        raise _no_such_case(pattern, f"it is no regular expression: {error}") from error
    matching = {number for number, case in cases.items() if words.search(f"{number} {case.rule}")}
    if not matching:
        raise _no_such_case(pattern, "it matches no number and no rule")
    return matching


def _parts(patterns: Iterable[str]) -> list[str]:
    return [part.strip() for pattern in patterns for part in pattern.split(",")]


def _matching(numbers: Collection[str], pattern: str) -> set[str]:
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise _no_such_case(pattern, "it is no number of a case, and no range of two")
    kind = next(iter(numbers), "C")[0]
    if any(letter in "CR" and letter != kind for letter in pattern.upper()):
        raise _no_such_case(pattern, f"the cases of this suite begin with {kind}")
    first, last = int(match[1]), int(match[2] or match[1])
    matching = {number for number in numbers if first <= int(number[2:]) <= last}
    if not matching:
        raise _no_such_case(pattern, "no case has such a number")
    return matching


def _no_such_case(pattern: str, why: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"no such case: {pattern}",
        why=why,
        hint="crust-conformance --list shows all; write C-101, or C-100..C-199",
    )
