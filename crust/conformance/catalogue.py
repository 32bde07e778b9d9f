"""Every case, and the two tables of docs/conformance.md, made from the code.

`python -m crust.conformance.catalogue docs/conformance.md` writes the tables again; a test compares the file with
this. What is around them is written by hand.
"""

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from crust.conformance import cases as package
from crust.conformance.case import Case, is_case, of
from crust.conformance.options import Parameters

_BETWEEN = r"(<!-- {0} -->\n).*?(<!-- end of {0} -->)"


def case_functions() -> Iterator[Callable[..., object]]:
    """Every case's function, by file and number."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield from _of(importlib.import_module(found.name))


def cases() -> list[Case]:
    """Every case, by number."""
    return sorted((of(each) for each in case_functions()), key=lambda each: each.number)


def render(page: str) -> str:
    """`page` with its tables generated again."""
    settings = ["| key | type | default | meaning |", "|---|---|---|---|", *_settings()]
    table = ["| case | strength | rule | clauses | needs |", "|---|---|---|---|---|"]
    table += [_row(each) for each in cases()]
    return _filled(_filled(page, "settings", settings), "cases", table)


def _filled(page: str, name: str, lines: list[str]) -> str:
    text = "\n".join(lines)
    pattern = re.compile(_BETWEEN.format(name), re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


def _of(module: ModuleType) -> Iterator[Callable[..., object]]:
    yield from (value for value in vars(module).values() if callable(value) and is_case(value))


def _settings() -> Iterator[str]:
    for name, value in Parameters.model_fields.items():
        kind = str(value.annotation).replace("<class '", "").replace("'>", "")
        default = value.get_default(call_default_factory=True)
        meaning = " ".join((value.description or "").split())
        yield f"| `{name}` | {_TYPES[kind]} | {_default(default)} | {meaning} |"


_TYPES = {
    "dict[str, str]": "table of strings",
    "int": "integer",
    "str": "string",
    "bool": "boolean",
    "bool | None": "boolean",
    "tuple[str, ...]": "list of strings",
}


def _default(value: object) -> str:
    shown = {True: "`true`", False: "`false`"} if isinstance(value, bool) else {}
    if value is None:
        return "tried out"
    return shown.get(bool(value), f"`{value}`" if value else "none")


def _row(case: Case) -> str:
    clauses = "<br>".join(f"{each}" for each in case.clauses)
    needs = ", ".join(f"`{each}`" for each in case.needs)
    cells = (case.number, str(case.strength), case.rule, clauses, needs)
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(render(file.read_text()))
