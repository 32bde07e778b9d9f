"""The catalogue: each case's rule, clauses and needs, as the tables of docs/conformance.md have them.

The page is the one place of a case's words, and a part of the wheel. The case itself is a function whose name has the
number: `test_c221_…` for drivers, `test_r101_…` for runtimes; a test compares both ways. A case has at least one
clause. The strongest one is the case's own: a failed assertion breaks that. Assertions of a weaker clause stand in a
block `with co.should():` or `with co.beyond():`, and the case goes on after them.

MUST stands for MUST, REQUIRED and SHALL, which decide whether the tested program is compliant; SHOULD for SHOULD and
RECOMMENDED. `beyond` is what the specification leaves open: the practice of a CO, or crust's own contract.

An operator chooses cases by their numbers: `C-101`, `c-101`, `101`, a range `C-100..C-199`, several with commas.
"""

import enum
import functools
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from crust.core import errors

_FUNCTION = re.compile(r"test_([cr])(\d{3})_")
_ROW = re.compile(r"\| [CR]-\d{3} \|")
_PATTERN = re.compile(r"(?:[cr]-?)?(\d{1,3})(?:\.\.(?:[cr]-?)?(\d{1,3}))?", re.IGNORECASE)
_CELLS = re.compile(r"(?<!\\)\|")


class Strength(enum.StrEnum):
    """How much a clause binds; the strongest first."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    BEYOND = "beyond"


@dataclass(frozen=True, slots=True)
class Clause:
    """A sentence of the specification: the section or the numbers, and what it says, shortened."""

    strength: Strength
    section: str
    gist: str = ""

    def __str__(self) -> str:
        """As the page and a report show it."""
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
        """The clause of this strength. Raises LookupError where the case has none."""
        for clause in self.clauses:
            if clause.strength is strength:
                return clause
        raise LookupError(f"{self.number} has no clause of strength {strength}")


def number_of(function: str) -> str:
    """The number in a function's name: C-221, R-101; empty for a function that is no case."""
    found = _FUNCTION.match(function)
    return f"{found[1].upper()}-{found[2]}" if found else ""


def cases(kind: str) -> Mapping[str, Case]:
    """The cases for drivers ("C") or for runtimes ("R"), by number."""
    return {number: case for number, case in _read().items() if number.startswith(kind)}


@functools.cache
def _read() -> Mapping[str, Case]:
    checkout = Path(__file__).parents[2] / "docs" / "conformance.md"
    installed = Path(sys.prefix, "share", "crust", "conformance.md")
    page = checkout if checkout.exists() else installed
    rows = filter(_ROW.match, page.read_text(encoding="utf-8").splitlines())
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


def chosen(known: Collection[str], only: Iterable[str], skip: Iterable[str]) -> frozenset[str]:
    """The cases of `known` that `only` names (all without it), less those of `skip`.

    Raises `errors.InvalidRequest` for what names no case: a misspelt number would run nothing, and pass.
    """
    named = [_matching(known, part) for part in _parts(only)]
    left_out = [_matching(known, part) for part in _parts(skip)]
    return frozenset(known if not named else set().union(*named)).difference(*left_out)


def _parts(patterns: Iterable[str]) -> list[str]:
    return [part.strip() for pattern in patterns for part in pattern.split(",")]


def _matching(known: Collection[str], pattern: str) -> set[str]:
    found = _PATTERN.fullmatch(pattern)
    if found is None:
        raise _no_such_case(pattern, "it is no number of a case, and no range of two")
    kind = next(iter(known), "C")[0]
    if any(letter in "CR" and letter != kind for letter in pattern.upper()):
        raise _no_such_case(pattern, f"the cases of this suite begin with {kind}")
    first, last = int(found[1]), int(found[2] or found[1])
    matching = {each for each in known if first <= int(each[2:]) <= last}
    if not matching:
        raise _no_such_case(pattern, "no case has such a number")
    return matching


def _no_such_case(pattern: str, why: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"no such case: {pattern}",
        why=why,
        hint="crust conformance --list shows all; write C-101, or C-100..C-199",
    )
