"""The table of conformance/crust_conformance/csi.md: lines of CSI's text, and the cases that test them."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[3] / "conformance" / "crust_conformance" / "csi.md"
WITHOUT_A_CASE = ("CO", "text", "every answer", "unseen: ")
"""How the cell begins of a row that no case tests; the page says what each means."""
DEMANDS = re.compile(r"\b(MUST|SHALL|REQUIRED)\b")
_ROW = re.compile(r"\| (\d[\d, ]*) \| (.+) \| (.+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """Lines that demand one thing, and the cell that says what tests it."""

    lines: tuple[int, ...]
    tested_by: str

    @property
    def cases(self) -> tuple[str, ...]:
        """The numbers of its cases; none in a row that begins with a reason."""
        if self.tested_by.startswith(WITHOUT_A_CASE):
            return ()
        return tuple(re.findall(r"C-\d{3}", self.tested_by.partition(" (")[0]))


def rows() -> tuple[Row, ...]:
    """Of all tables of the page."""
    found = _ROW.findall(PAGE.read_text(encoding="utf-8"))
    return tuple(Row(tuple(map(int, lines.split(","))), cell) for lines, _, cell in found)
