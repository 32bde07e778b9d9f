"""The rules of the tree, which tests/unit/tree holds the shipped packages to."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ("crust", "conformance/crust_conformance")
"""The packages of the distributions, below the checkout."""
_GENERATED = "crust/wire/"


def sources(root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """The Python files of the shipped packages, without generated code: the path below the checkout, and the file."""
    for package in SHIPPED:
        for file in sorted((root / package).rglob("*.py")):
            path = str(file.relative_to(root))
            if not path.startswith(_GENERATED):
                yield path, file
