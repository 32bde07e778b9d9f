"""Tables, documents and ages as they are printed."""

import datetime
import json
from dataclasses import dataclass

import pytest

from crust.inspection import output

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


@pytest.mark.parametrize(
    ("rows", "wide", "lines"),
    [
        (
            [Thing("n" * 300, "", NOW), Thing("é", "x", NOW)],  # neither cut nor wrapped
            True,
            [f"NAME{' ' * 298}NOTE", f"{'n' * 300}  -", f"é{' ' * 301}x"],
        ),
        ([Thing("a", "b", NOW)], False, ["NAME", "a"]),
        ([Thing("a\x1b[31m\nb", "", NOW)], False, ["NAME", "a\\x1b[31m\\nb"]),
    ],
    ids=["long", "narrow", "control-characters"],
)
def test_table_has_a_line_for_each_row(rows: list[Thing], *, wide: bool, lines: list[str]) -> None:
    assert output.table(COLUMNS, rows, wide=wide).plain.splitlines() == lines


def test_cell_has_the_style_of_its_text() -> None:
    text = output.table(COLUMNS, [Thing("bad", "", NOW)], wide=False)
    assert output.BAD in {str(span.style) for span in text.spans}


def test_document_has_the_names_of_the_fields() -> None:
    document = json.loads(output.document({"things": [Thing("a", "b", NOW)]}))
    assert document == {"things": [{"name": "a", "note": "b", "since": NOW.isoformat()}]}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (11100, "3h5m"), (9 * 86400, "9d")],
)
def test_age_has_one_or_two_units(seconds: int, shown: str) -> None:
    assert output.age(NOW - datetime.timedelta(seconds=seconds), NOW) == shown
