"""The code blocks of a page of docs/, in their order: fenced, also in a list, or indented by four spaces or more."""

import textwrap
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
_FENCE = "```"


def text(page: str) -> str:
    """The page as it stands."""
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[str]:
    """Each block without its fence or its indentation."""
    found: list[list[str]] = []
    is_fenced, before = False, ""
    for line in text(page).splitlines():
        if line.strip().startswith(_FENCE):
            is_fenced = not is_fenced
            if is_fenced:
                found.append([])
        elif is_fenced or (line.startswith("    ") and before.startswith(("    ", "\t"))):
            found[-1].append(line)
        elif line.startswith("    "):
            found.append([line])
        elif not line and before.startswith("    "):
            found[-1].append(line)
            continue  # a blank line inside of a block
        before = line
    return [textwrap.dedent("\n".join(lines)).strip("\n") for lines in found]
