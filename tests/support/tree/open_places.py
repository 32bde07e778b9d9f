"""The list of the places that count a missing answer as an answer today. It may only shrink: `make open-places`.

A line is path, function, rule and count, with tabs between. There are no line numbers, so an edit elsewhere does not
change the list. The command removes what crust/ does not have any more, and adds nothing: a new place is mended, or
it is a boundary with a reason in tests/unit/tree. When a function gets another name or module, its line is edited by
hand.
"""

from collections import Counter
from pathlib import Path

from tests.support.tree import ROOT
from tests.support.tree.missing_answers import Place, Places, places

LIST = ROOT / "tests/unit/tree/open_places.tsv"


def read(path: Path = LIST) -> Places:
    """The places of the list."""
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return {Place(file, function, rule): int(count) for file, function, rule, count in rows}


def write(listed: Places, path: Path = LIST) -> None:
    """Write the list, sorted."""
    rows = ["\t".join((*place, str(count))) for place, count in sorted(listed.items())]
    path.write_text("".join(f"{row}\n" for row in rows))


def shrunk(listed: Places, found: Places) -> Places:
    """The list without what is not found any more."""
    return Counter(listed) & Counter(found)


if __name__ == "__main__":
    write(shrunk(read(), places()))
