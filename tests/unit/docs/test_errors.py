"""docs/errors.md has one row for each name of an error in the code, below the branch that gives its gRPC code."""

from collections import Counter
from pathlib import Path

import pytest

from crust.cli import explain
from crust.core import errors
from crust.rpc import status
from tests.support.pages import error_table
from tests.support.raised import raised

TEXT = (Path(__file__).parents[3] / "docs" / "errors.md").read_text(encoding="utf-8")
PAGES = tuple(explain.pages(TEXT))
BRANCHES = {branch.__name__ for branch in status.CODES}
ROWS = [page for page in PAGES if page.name not in BRANCHES]


def test_table_has_each_name_of_the_code_under_its_branch() -> None:
    code = {(name, branch.__name__) for name, branch, _ in error_table.names()}
    page = {(row.name, row.kind.partition(":")[0]) for row in PAGES}
    assert page - code == set(), "not in the code"
    assert {each for each in code if each[0] not in BRANCHES} - page == set(), "no row"


def test_names_of_errors_are_unique() -> None:
    """People look an error up by its name. A name has one branch, one row, and one class or none."""
    classes = Counter(kind.__name__ for kind in error_table.all_errors())
    rows = Counter(row.name for row in PAGES)
    kinds = Counter(name for name, _ in {(name, of) for name, of, _ in error_table.names()})
    assert [name for name, count in (classes + Counter()).items() if count > 1] == []
    assert [name for name, count in rows.items() if count > 1] == []
    assert [name for name, count in kinds.items() if count > 1] == []
    named = {name for name, _, _ in error_table.named()}
    assert named & classes.keys() == set(), "raised by its class and by `named`"


def test_errors_of_the_example_are_marked() -> None:
    examples = {name for name, _, is_example in error_table.names() if is_example}
    marked = {line.split("`")[1] for line in TEXT.splitlines() if "` *example* |" in line}
    assert marked == examples - BRANCHES


def test_every_branch_has_its_code_meaning_and_advice() -> None:
    of_branches = {page.name: page for page in PAGES if page.name in BRANCHES}
    assert of_branches.keys() == BRANCHES
    for branch, code in status.CODES.items():
        page = of_branches[branch.__name__]
        meaning = (branch.__doc__ or "").splitlines()[0]
        assert (page.code, page.happened) == (code.name, meaning)
        assert (page.retried_by, page.advice) == (branch.retried_by, branch.advice)


@pytest.mark.parametrize("branch", sorted(BRANCHES))
def test_rows_of_a_branch_are_complete_and_in_order(branch: str) -> None:
    rows = [row for row in ROWS if row.kind.startswith(f"{branch}:")]
    assert [row.name for row in rows] == sorted(row.name for row in rows)
    assert [row.name for row in rows if not row.happened.strip()] == []


def test_named_error_is_of_its_branch_and_shows_its_name() -> None:
    with raised("StillDeferred", errors.NotReady, match="^volume a: b; c$") as caught:
        raise errors.NotReady.named("StillDeferred", "volume a", why="b", hint="c")
    assert caught.value.shown() == "[StillDeferred] volume a: b; c"
    assert type(caught.value) is errors.NotReady
