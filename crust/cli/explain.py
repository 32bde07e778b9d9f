"""`crust explain`: the page of an error, found by the name that a message, a log line or ErrorInfo shows.

It reads docs/errors.md, the one table of the names, which is a part of the package: an installed crust explains its
own version.
"""

import difflib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import click

from crust.core import errors

_OTHERS = "## What others say"
"""The last section: texts that are no errors of crust."""
_BRANCH = re.compile(r"## (\w+): `(\w+)`")
_ROW = re.compile(r"\| `(\w+)` \| (.*) \| (.*) \|")
_OTHER = re.compile(r"\| (`.*) \| (.*) \| (.*) \|")
_ADVICE = re.compile(r"Who retries: (.*)\. What to do: (.*)\.")


@dataclass(frozen=True, slots=True)
class Page:
    """The page of one error. `kind` is the branch's name and its meaning."""

    name: str
    happened: str
    code: str
    kind: str
    retried_by: str
    advice: str


def print_page(name: str) -> None:
    """Print the page of the error `name`, in any case, with or without brackets.

    Raises click.UsageError for a name that no error has.
    """
    pages_by_name = {page.name.lower(): page for page in pages(errors.TABLE)}
    # what other programs say because of crust: a page for each name of a row
    for row in filter(None, map(_OTHER.fullmatch, errors.TABLE.partition(_OTHERS)[2].splitlines())):
        for text in re.findall(r"[`\"]([^`\"]+)[`\"]", row[1]):
            pages_by_name[text.lower()] = Page(text, row[2], "", "", "", row[3])
    key = name.strip("[]").lower()
    if key not in pages_by_name:
        near = difflib.get_close_matches(key, pages_by_name, n=1)
        suggestion = f": did you mean {pages_by_name[near[0]].name}?" if near else ""
        raise click.UsageError(f"no error of crust is called {name!r}{suggestion}")
    page = pages_by_name[key]
    click.echo(f"[{page.name}]\n")
    for title, text in (
        ("what happened", page.happened),
        ("gRPC code", page.code),
        ("kind", page.kind),
        ("who retries", page.retried_by),
        ("what to do", page.advice),
    ):
        if text:
            first, further = f"  {title:<14}", " " * 16
            click.echo(textwrap.fill(text, 100, initial_indent=first, subsequent_indent=further))


def pages(table: str) -> Iterator[Page]:
    """The pages of all errors in the text of docs/errors.md, with the branches' own.

    Raises click.ClickException for a section without its branch, its meaning or its advice.
    """
    for section in re.split(r"^(?=## )", table.partition(_OTHERS)[0], flags=re.MULTILINE)[1:]:
        lines = section.splitlines()
        branch = _BRANCH.fullmatch(lines[0])
        retry = _ADVICE.fullmatch(lines[3]) if len(lines) > 3 else None
        if branch is None or retry is None:
            raise click.ClickException(
                f"the table of the errors cannot be read: {lines[0]!r} is no branch with its meaning and advice"
            )
        meaning = lines[2]
        kind = f"{branch[1]}: {meaning}"
        yield Page(branch[1], meaning, branch[2], kind, retry[1], retry[2])
        for row in filter(None, map(_ROW.fullmatch, lines[4:])):
            happened, advice = (cell.replace("\\|", "|") for cell in row.group(2, 3))
            yield Page(row[1], happened, branch[2], kind, retry[1], advice or retry[2])
