"""docs/architecture.md: every file it names exists, and so does every function that its request flows name."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LINE = re.compile(r"^\| `((?:crust|examples)/[\w/]+\.py)` \| ([^|]+) \|", re.MULTILINE)
STEPS = [(path, name) for path, names in LINE.findall(PAGE) for name in re.findall(r"`([\w.]+)`", names)]  # fmt: skip
FILES = sorted(set(re.findall(r"`((?:crust|examples|tests|specs|docs)/[\w./-]+)`", PAGE)))
IN_PROSE = [
    (name, path)
    for name, path in re.findall(r"`(\w+)`\s+(?:of|in)\s+`((?:crust|examples)/[\w/]+\.py)`", PAGE)
]


def find(path: str, name: str) -> object:
    found: object = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_every_row_of_a_request_flow_is_parsed() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith(("| `crust/", "| `examples/"))]
    named = [line for line in lines if line.split("|")[1].strip().endswith(".py`")]
    assert len(named) == len(LINE.findall(PAGE))
    assert len(STEPS) > 70
    assert len(FILES) > 60
    assert len(IN_PROSE) >= 5


@pytest.mark.parametrize(("path", "name"), STEPS)
def test_step_of_request_flow_is_function_of_its_file(path: str, name: str) -> None:
    assert callable(find(path, name))


@pytest.mark.parametrize("path", FILES)
def test_a_file_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("name", "path"), IN_PROSE)
def test_name_that_prose_places_in_a_file_exists(name: str, path: str) -> None:
    assert find(path, name) is not None


def test_every_package_has_its_rule() -> None:
    packages = {path.name for path in (ROOT / "crust").iterdir() if (path / "__init__.py").exists()}
    assert {package for package in packages if f"| `crust/{package}` |" not in PAGE} == set()
