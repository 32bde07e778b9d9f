"""The pages for authors print the examples; tests/integration/authors runs them from the pages."""

import ast

import pytest

from tests.support.pages.page_programs import PAGES, ROOT, program

MOST_LINES = {"driver-author.md": 100, "runtime-author.md": 75}


def _lines_of_code(text: str) -> int:
    """Without imports, docstrings, comments and blank lines."""
    aside: set[int] = set()
    for node in ast.parse(text).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            aside |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) for number, line in numbered if number not in aside)


@pytest.mark.parametrize("page", PAGES)
def test_program_of_page_is_the_example(page: str) -> None:
    assert program(page) == (ROOT / "examples" / PAGES[page]).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_program_of_page_is_short(page: str) -> None:
    assert _lines_of_code(program(page)) <= MOST_LINES[page]
