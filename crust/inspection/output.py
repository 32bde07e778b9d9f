"""How the commands for operators print lists: as a table, a wide table, JSON or names.

A line of a table is never wrapped or cut, so that grep, awk and copying work: the terminal wraps it. An empty cell is
"-", and control characters are escaped, because ids and messages come from other programs. On a terminal, without
NO_COLOR, colours show the states that the words name.
"""

import dataclasses
import datetime
import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import cells
from rich.text import Text

from crust.core.printable import printable

GOOD, BUSY, BAD = "green", "yellow", "bold red"
_TITLE = "bold"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; `wide`: shown with `-o wide` only.

    A cell is the row's field `value`, by default the field of the title, or the result of the function `value`.
    """

    title: str
    value: str | Callable[[Any], str] = ""
    wide: bool = False
    styles: Mapping[str, str] = field(default_factory=dict)
    """The colour of a cell, by its text."""

    def cell(self, row: object) -> str:
        if callable(self.value):
            return self.value(row)
        value = getattr(row, self.value or self.title)
        return ",".join(value) if isinstance(value, tuple) else str(value)


def table(columns: Sequence[Column], rows: Sequence[object], *, wide: bool) -> Text:
    """The rows below the titles, each column as wide as its widest cell."""
    visible = [column for column in columns if wide or not column.wide]
    texts = [[printable(column.cell(row)) or "-" for column in visible] for row in rows]
    titles = [column.title.upper() for column in visible]
    widths = [max(map(cells.cell_len, column)) for column in zip(titles, *texts, strict=True)]
    lines = [_line([(title, _TITLE) for title in titles], widths)]
    for row in texts:
        styled = [
            (text, column.styles.get(text, "")) for text, column in zip(row, visible, strict=True)
        ]
        lines.append(_line(styled, widths))
    return Text("\n").join(lines)


def fields(pairs: Iterable[tuple[str, str]]) -> Text:
    """One fact per line, without the empty ones."""
    lines = [
        Text.assemble((f"{title:<14}", _TITLE), printable(text)) for title, text in pairs if text
    ]
    return Text("\n").join(lines)


def document(value: Any) -> str:
    """JSON of frozen dataclasses and lists of them, in ASCII: a terminal obeys C1 and bidirectional characters."""
    return json.dumps(value, default=_plain, indent=2)


def age(since: datetime.datetime | None, now: datetime.datetime) -> str:
    """How long ago, in one or two units: 45s, 12m, 3h5m, 9d."""
    if since is None:
        return ""
    seconds = max(0, int((now - since).total_seconds()))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if minutes < 2:
        return f"{seconds}s"
    if hours < 2:
        return f"{minutes}m"
    return f"{hours}h{minutes % 60}m" if days < 2 else f"{days}d"


def _line(styled: Sequence[tuple[str, str]], widths: Sequence[int]) -> Text:
    line = Text()
    for (text, style), width in zip(styled, widths, strict=True):
        line.append(text, style)
        line.append(" " * (width - cells.cell_len(text) + 2))
    line.rstrip()
    return line


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"no JSON for {type(value).__name__}")
