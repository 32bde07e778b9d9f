"""Each MUST of handoff.md and deferral.md has a case, or a reason why none can test it; each case has its clause."""

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from crust_conformance import catalogue

PAGE = Path(catalogue.__file__).with_name("clauses.md")
SPECS = Path(__file__).parents[3] / "specs"
_ROW = re.compile(r"^\| ([DH]-\d+) \| (\d[\d, ]*) \| .+ \| (.+) \|$", re.MULTILINE)
_CLAUSE = re.compile(r"^- \*\*([DH]-\d+)\*\* (.*?)(?=^- \*\*|^## |\Z)", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r"proxy|guest|Ceph|text|unseen: \w.+")
_ROWS = _ROW.findall(PAGE.read_text(encoding="utf-8"))
_CASES = {**catalogue.cases("R"), **catalogue.cases("C")}


def _cases_of(cell: str) -> list[str]:
    """The cases of a row; none in one that begins with a reason."""
    return [] if _REASON.fullmatch(cell) else cell.partition(" (")[0].split(", ")


def _clauses_of(case: str) -> set[str]:
    """The clauses of the two pages that the case's row names."""
    sections = " ".join(clause.section for clause in _CASES[case].clauses)
    return set(re.findall(r"\b[DH]-\d+\b", sections))


@pytest.mark.parametrize("page", ["handoff.md", "deferral.md"])
def test_each_must_stands_in_one_row(page: str) -> None:
    clauses = _CLAUSE.findall((SPECS / page).read_text(encoding="utf-8"))
    demanded = Counter(
        (clause, number)
        for clause, text in clauses
        for number in range(1, len(re.findall(r"\bMUST\b", text)) + 1)
    )
    names = {clause for clause, _ in clauses}
    listed = Counter(
        (clause, int(number))
        for clause, numbers, _ in _ROWS
        for number in numbers.split(",")
        if clause in names
    )
    assert len(demanded) > 100
    assert listed == demanded


@pytest.mark.parametrize(("clause", "cell"), [(clause, cell) for clause, _, cell in _ROWS])
def test_row_has_a_reason_or_cases_of_its_clause(clause: str, cell: str) -> None:
    assert [case for case in _cases_of(cell) if clause not in _clauses_of(case)] == []


def test_each_clause_of_a_case_has_a_row_with_it() -> None:
    named = {(clause, case) for case in _CASES for clause in _clauses_of(case)}
    listed = defaultdict[str, set[str]](set)
    for clause, _, cell in _ROWS:
        listed[clause].update(_cases_of(cell))
    assert named == {(clause, case) for clause, cases in listed.items() for case in cases}
