"""What the pages name exists: files, tests, and the targets of links."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "specs").glob("*.md")]
)  # fmt: skip
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)]*)?\)")


def names_of(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", names_of(PAGES))
def test_links_of_page_exist(page: str) -> None:
    links = [path for path, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8"))]
    local = [path for path in links if "://" not in path]
    assert [path for path in local if not ((ROOT / page).parent / path).exists()] == []


@pytest.mark.parametrize("page", names_of(PAGES))
def test_tests_named_by_page_exist(page: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / page).read_text(encoding="utf-8")))
    assert {name for name in named if f"def {name}(" not in TESTS} == set()


@pytest.mark.parametrize("page", names_of(PAGES))
def test_files_named_by_page_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:crust|examples|tests|specs|deploy)/[\w./-]+\.\w+)`", text))
    assert {path for path in files if not (ROOT / path).exists()} == set()


def test_every_test_of_a_defence_is_one_function() -> None:
    """By a name that two files have nobody finds out which of them shows the defence, or whether one is gone."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    defined = Counter(re.findall(r"\bdef (test_\w+)\(", TESTS))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert {name: defined[name] for name in named if defined[name] != 1} == {}


def test_every_line_of_defence_names_a_file_and_a_test() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.count(" | ") == 3]
    defences = [line for line in lines if not line.startswith("| it could")]
    assert len(defences) > 25
    places = (".py`", "`deploy/")
    assert [
        each for each in defences if not any(map(each.__contains__, places)) or "`test_" not in each
    ] == []
