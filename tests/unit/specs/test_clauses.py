"""The specifications: clauses are numbered without gaps, and each is named by a test."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CLAUSE = re.compile(r"^- \*\*([DN]-\d+)\*\* (.*?)(?=^- \*\*|^## |\Z)", re.MULTILINE | re.DOTALL)
PAGES = {"D": "deferral.md", "N": "node-identity.md"}


@functools.cache
def _clauses_of(page: str) -> dict[str, str]:
    return dict(CLAUSE.findall((ROOT / "specs" / page).read_text(encoding="utf-8")))


def _clauses() -> dict[str, str]:
    return {name: text for page in PAGES.values() for name, text in _clauses_of(page).items()}


@functools.cache
def _named() -> dict[str, list[str]]:
    """Clause to the tests that carry its marker, from the source: no test needs to be imported."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for clause in _markers(node.decorator_list):
                    found[clause].append(f"{path.name}::{node.name}")
    return found


def _markers(decorators: list[ast.expr]) -> list[str]:
    return [
        str(argument.value)
        for each in decorators
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.spec"
        for argument in each.args
        if isinstance(argument, ast.Constant)
    ]


@pytest.mark.parametrize(("letter", "least"), [("D", 28), ("N", 10)])
def test_clauses_are_numbered_without_gaps(letter: str, least: int) -> None:
    clauses = _clauses_of(PAGES[letter])
    assert list(clauses) == [f"{letter}-{number}" for number in range(1, len(clauses) + 1)]
    assert len(clauses) >= least


@pytest.mark.parametrize("clause", _clauses())
def test_clause_has_an_obligation_and_a_test(clause: str) -> None:
    assert "MUST" in _clauses()[clause] or "decided once" in _clauses()[clause]
    assert _named()[clause], f"no test is marked spec({clause!r})"


def test_no_test_names_a_clause_that_does_not_exist() -> None:
    named = {clause for clause in _named() if clause.partition("-")[0] in PAGES}
    assert sorted(named - set(_clauses())) == []
