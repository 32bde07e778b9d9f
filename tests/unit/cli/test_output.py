"""Tables, fields and JSON of the commands for operators."""

import datetime
import json
from dataclasses import dataclass

import pytest

from crust.cli import output
from crust.cli.inspecting import views

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Thing:
    name: str
    note: str
    since: datetime.datetime


COLUMNS = (
    output.Column("name", lambda row: row.name, styles={"bad": output.BAD}),
    output.Column("note", lambda row: row.note, wide=True),
)


def test_long_cells_are_neither_cut_nor_wrapped() -> None:
    text = output.table(COLUMNS, [Thing("n" * 300, "", NOW), Thing("é", "x", NOW)], wide=True).plain
    assert text.splitlines() == [f"NAME{' ' * 298}NOTE", f"{'n' * 300}  -", f"é{' ' * 301}x"]


def test_narrow_table_leaves_wide_columns_out() -> None:
    assert output.table(COLUMNS, [Thing("a", "b", NOW)], wide=False).plain == "NAME\na"


def test_control_characters_of_other_programs_are_escaped() -> None:
    text = output.table(COLUMNS, [Thing("a\x1b[31m\nb", "", NOW)], wide=False).plain
    assert text == "NAME\na\\x1b[31m\\nb"


def test_cell_has_the_style_of_its_text() -> None:
    text = output.table(COLUMNS, [Thing("bad", "", NOW)], wide=False)
    assert output.BAD in {str(span.style) for span in text.spans}


def test_document_has_the_names_of_the_fields() -> None:
    found = json.loads(output.document({"things": [Thing("a", "b", NOW)]}))
    assert found == {"things": [{"name": "a", "note": "b", "since": NOW.isoformat()}]}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (11100, "3h5m"), (9 * 86400, "9d")],
)
def test_age_has_one_or_two_units(seconds: int, shown: str) -> None:
    assert output.age(NOW - datetime.timedelta(seconds=seconds), NOW) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, ""), (1, "1"), (1023, "1023"), (1024, "1Ki"), (1536 * 2**20, "1.5Gi"), (5 * 2**50, "5120Ti")],
)  # fmt: skip
def test_size_has_the_unit_that_fits(count: int, shown: str) -> None:
    assert views.size(count) == shown
