"""specs/deferral.md: clauses are numbered without gaps, and each is named by a test."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CLAUSE = re.compile(r"^- \*\*(D-\d+)\*\* (.*?)(?=^- \*\*|^## |\Z)", re.MULTILINE | re.DOTALL)


def _clauses() -> dict[str, str]:
    text = (ROOT / "specs" / "deferral.md").read_text(encoding="utf-8")
    return dict(CLAUSE.findall(text))


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


def test_clauses_are_numbered_without_gaps() -> None:
    assert list(_clauses()) == [f"D-{number}" for number in range(1, len(_clauses()) + 1)]
    assert len(_clauses()) >= 28


@pytest.mark.parametrize("clause", _clauses())
def test_clause_has_an_obligation_and_a_test(clause: str) -> None:
    assert "MUST" in _clauses()[clause] or "decided once" in _clauses()[clause]
    assert _named()[clause], f"no test is marked spec({clause!r})"


def test_no_test_names_a_clause_that_does_not_exist() -> None:
    named = {clause for clause in _named() if clause.startswith("D-")}
    assert sorted(named - set(_clauses())) == []
