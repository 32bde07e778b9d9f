"""What the pages name exists: files, tests, log messages, codes of errors, targets of links. Tables are complete."""

import re
from collections import Counter
from pathlib import Path

import grpc
import pytest

from crust.rpc import status
from tests.support.pages import error_table

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    path for place in ("*.md", "docs/**/*.md", "specs/**/*.md") for path in ROOT.glob(place)
)
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)]*)?\)")
CODE = "\n".join(
    path.read_text(encoding="utf-8")
    for top in ("crust", "examples")
    for path in (ROOT / top).rglob("*.py")
)
MESSAGE = re.compile(r"`([a-z]+(?: [\w'-]+){3,})`")
PROGRAMS = ("crust", "ceph", "kubectl", "mdadm", "python", "systemctl")
"""What a text of several words in the type of code begins with, if it is no log message."""


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def bars(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of the headings; a heading that comes again gets a number."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def names_of(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", names_of(PAGES))
def test_links_of_page_exist(page: str) -> None:
    links = [path for path, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8"))]
    local = [path for path in links if "://" not in path]
    assert [path for path in local if not ((ROOT / page).parent / path).exists()] == []


@pytest.mark.parametrize("page", names_of(PAGES))
def test_anchors_of_links_are_headings(page: str) -> None:
    links = re.findall(r"\]\(([^)\s#]*)#([^)]*)\)", (ROOT / page).read_text(encoding="utf-8"))
    local = [(path, anchor) for path, anchor in links if "://" not in path]
    here = (ROOT / page).parent
    missing = [
        (path, anchor)
        for path, anchor in local
        if anchor not in anchors(here / path if path else ROOT / page)
    ]
    assert missing == []


@pytest.mark.parametrize("page", names_of(PAGES))
def test_rows_of_a_table_have_as_many_cells_as_its_head(page: str) -> None:
    text = without_code(ROOT / page)
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    assert [row for table in tables for row in table if bars(row) != bars(table[0])] == []


@pytest.mark.parametrize("page", names_of(PAGES))
def test_log_messages_named_by_page_are_in_the_code(page: str) -> None:
    named = set(MESSAGE.findall((ROOT / page).read_text(encoding="utf-8")))
    messages = {each for each in named if not each.startswith(PROGRAMS)}
    assert {each for each in messages if each not in CODE} == set()


def test_code_beside_the_name_of_an_error_is_its_code() -> None:
    """`Name` (CODE, `Name`, CODE and CODE (`Name`): on all pages."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    code = "|".join(each.name for each in grpc.StatusCode)
    named = {(name, of) for name, of in re.findall(rf"`([A-Z]\w+)`(?:,| \() ?({code})\b", text)}
    named |= {(name, of) for of, name in re.findall(rf"\b({code})(?: \(|: )`([A-Z]\w+)`", text)}
    assert len(named) > 8
    codes = {(name, status.CODES[branch].name) for name, branch, _ in error_table.names()}
    assert named - codes == set()


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
