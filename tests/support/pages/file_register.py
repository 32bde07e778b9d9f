"""docs/files.md: a line for each file of the shipped packages, with the first sentence of its docstring."""

import ast
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_HEAD = """# Files

Each file of the package `crust`, with the first sentence of its docstring. `make docs-output` writes this page.
[architecture.md](architecture.md) shows how they work together.
"""


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    directories = sorted({path.parent for path in (_ROOT / "crust").rglob("*.py")})
    for directory in directories:
        name = directory.relative_to(_ROOT)
        if "wire" in name.parts:
            continue
        lines += [f"## {name}", "", "| file | what it is for |", "|---|---|"]
        files = sorted(path for path in directory.glob("*.py") if path.name != "_version.py")
        lines += [f"| {path.name} | {_subject(path)} |" for path in files]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _subject(path: Path) -> str:
    """The first sentence, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".:").replace("|", "\\|")


if __name__ == "__main__":
    (_ROOT / "docs" / "files.md").write_text(page(), encoding="utf-8")
