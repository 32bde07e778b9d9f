"""Pages name what exists: files, tests, messages, errors, links, layers, stories of the KEP, the API of authors."""

import ast
import importlib
import re
from collections import Counter
from pathlib import Path
from typing import NewType

import grpc
import pytest

from crust.cli import explain, main
from crust.core import errors
from crust.rpc import status
from tests.support.pages import error_table, file_register, page_programs
from tests.support.raised import raised
from tests.support.tree import SHIPPED

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    path
    for place in ("*.md", "docs/**/*.md", "specs/**/*.md", "conformance/**/*.md")
    for path in ROOT.glob(place)
)
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)]*)?\)")
CODE = "\n".join(
    path.read_text(encoding="utf-8")
    for top in (*SHIPPED, "examples")
    for path in (ROOT / top).rglob("*.py")
)
MESSAGE = re.compile(r"`([a-z]+(?: [\w'-]+){3,})`")
PROGRAMS = ("crust", "ceph", "helm", "kubectl", "mdadm", "python", "systemctl")
"""What a text of several words in the type of code begins with, if it is no log message."""


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def bars(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of the headings; a heading that comes again gets a number."""
    seen: Counter[str] = Counter()
    named = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        named.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return named


def names_of(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def test_names_of_tests_have_at_most_ten_words() -> None:
    names = re.findall(r"^ *(?:async )?def test_(\w+)", TESTS, re.MULTILINE)
    assert [name for name in names if name.count("_") >= 10] == []


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
def test_rows_have_as_many_cells_as_their_head(page: str) -> None:
    text = without_code(ROOT / page)
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    assert [row for table in tables for row in table if bars(row) != bars(table[0])] == []


@pytest.mark.parametrize("page", names_of(PAGES))
def test_log_messages_named_by_page_are_in_the_code(page: str) -> None:
    named = set(MESSAGE.findall((ROOT / page).read_text(encoding="utf-8")))
    messages = {name for name in named if not name.startswith(PROGRAMS)}
    assert {message for message in messages if message not in CODE} == set()


def test_code_beside_the_name_of_an_error_is_its_code() -> None:
    """`Name` (CODE, `Name`, CODE and CODE (`Name`): on all pages."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    code = "|".join(code.name for code in grpc.StatusCode)
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
    files = set(
        re.findall(r"`((?:crust|conformance|deploy|docs|examples|specs|tests)/[\w./-]+)`", text)
    )
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
        line for line in defences if not any(map(line.__contains__, places)) or "`test_" not in line
    ] == []


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
BOTH = ARCHITECTURE + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
IN_PROSE = [
    (name, path)
    for name, path in re.findall(
        r"`([\w.]+)`\s+(?:of|in)\s+`((?:crust|examples)/[\w/]+\.py)`", BOTH
    )
]


def find(path: str, name: str) -> object:
    part_of: object = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        part_of = getattr(part_of, part)
    return part_of


def test_request_has_at_most_six_stations_each_with_its_functions() -> None:
    tables = ARCHITECTURE.split("| station | where | what happens |")[1:]
    assert len(tables) == 9
    for table in tables:
        rows = [line for line in table.partition("\n\n")[0].splitlines() if " | " in line]
        assert 5 <= len(rows) <= 6
        for row in rows:
            assert re.search(r"`[\w.]+` of `(crust|examples)/", row.split(" | ")[1]), row


def test_register_of_files_is_generated() -> None:
    register = ROOT / "docs" / "files.md"
    assert register.read_text(encoding="utf-8") == file_register.page(), "run `make docs-output`"


@pytest.mark.parametrize(("name", "path"), IN_PROSE)
def test_name_that_prose_places_in_a_file_exists(name: str, path: str) -> None:
    assert find(path, name) is not None


def test_index_of_decisions_has_each_with_its_title() -> None:
    index = ROOT / "docs" / "decisions" / "README.md"
    listed = re.findall(
        r"^\| (\d+) \| \[(.*)\]\((.*)\) \|$", index.read_text(encoding="utf-8"), re.M
    )
    decisions = sorted(path for path in index.parent.glob("*.md") if path != index)
    titles = [path.read_text(encoding="utf-8").partition("\n")[0] for path in decisions]
    assert [f"# {number}. {title}" for number, title, _ in listed] == titles
    assert [name for _, _, name in listed] == [path.name for path in decisions]


def test_every_package_has_its_rule() -> None:
    packages = {path.name for path in (ROOT / "crust").iterdir() if (path / "__init__.py").exists()}
    assert {
        package for package in packages if f"| `crust/{package}` |" not in ARCHITECTURE
    } == set()


TEST_FILES = Path(__file__).parents[2]


def test_each_story_has_a_test() -> None:
    stories = {
        argument.value
        for path in TEST_FILES.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.story"
        for argument in decorator.args
        if isinstance(argument, ast.Constant)
    }
    assert stories == set(range(1, 7))


API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
MODULES = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(
        r"^\| `(crust(?:_conformance)?\.[\w.]+)` \| ([^|]+) \|", API, re.MULTILINE
    )
}


def test_table_of_modules_is_parsed() -> None:
    section = API.partition("## Python")[2].partition("## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(MODULES) > 5


@pytest.mark.parametrize("module", MODULES)
def test_all_of_public_module_equals_its_row(module: str) -> None:
    public = importlib.import_module(module)
    classes = [
        name
        for name, value in vars(public).items()
        if isinstance(value, type | NewType) and value.__module__ == module
    ]
    names = classes if module.startswith("crust.core.") else public.__all__
    assert sorted(MODULES[module]) == sorted(names)
    assert [name for name in names if not hasattr(public, name)] == []


def test_every_command_has_its_exit_codes() -> None:
    section = API.partition("## Exit codes")[2].partition("## ")[0]
    first = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    commands = {word for cell in first for word in re.findall(r"`(?:crust )?([\w-]+)`", cell)}
    assert commands == {*main.main.commands, "crust-conformance"}


def test_docstring_of_driver_library_uses_public_names() -> None:
    library = importlib.import_module("crust.csi_shim.library")
    used = set(re.findall(r"library\.(\w+)", library.__doc__ or ""))
    assert used
    assert used <= set(library.__all__)


def test_example_runtime_takes_public_names_from_public_modules() -> None:
    taken = {
        (node.module, name.name)
        for path in (ROOT / "examples" / "kata").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for name in node.names
    }
    assert len(taken) > 3
    public = {(module, name) for module, names in MODULES.items() for name in names}
    submodules = {tuple(module.rsplit(".", 1)) for module in MODULES}
    assert taken - public - submodules == set()


ERROR_PAGES = tuple(explain.pages(errors.TABLE))
BRANCHES = {branch.__name__ for branch in status.CODES}
ROWS = [page for page in ERROR_PAGES if page.name not in BRANCHES]


def test_table_has_each_name_of_the_code_under_its_branch() -> None:
    code = {(name, of.__name__) for name, of, is_example in error_table.names() if not is_example}
    page = {(row.name, row.kind.partition(":")[0]) for row in ERROR_PAGES}
    assert page - code == set(), "not in the code"
    assert {row for row in code if row[0] not in BRANCHES} - page == set(), "no row"


def test_names_of_errors_are_unique() -> None:
    """People look an error up by its name. A name has one branch, one row, and one class or none."""
    classes = Counter(kind.__name__ for kind in error_table.all_errors())
    rows = Counter(row.name for row in ERROR_PAGES)
    kinds = Counter(name for name, _ in {(name, of) for name, of, _ in error_table.names()})
    assert [name for name, count in (classes + Counter()).items() if count > 1] == []
    assert [name for name, count in rows.items() if count > 1] == []
    assert [name for name, count in kinds.items() if count > 1] == []
    named = {name for name, _, _ in error_table.named()}
    assert named & classes.keys() == set(), "raised by its class and by `named`"


def test_every_branch_has_its_code_meaning_and_advice() -> None:
    of_branches = {page.name: page for page in ERROR_PAGES if page.name in BRANCHES}
    assert of_branches.keys() == BRANCHES
    for branch, code in status.CODES.items():
        page = of_branches[branch.__name__]
        meaning = (branch.__doc__ or "").splitlines()[0]
        assert (page.code, page.happened) == (code.name, meaning)
        assert page.retried_by
        assert page.advice


@pytest.mark.parametrize("branch", sorted(BRANCHES))
def test_rows_of_a_branch_are_complete_and_in_order(branch: str) -> None:
    rows = [row for row in ROWS if row.kind.startswith(f"{branch}:")]
    assert [row.name for row in rows] == sorted(row.name for row in rows)
    assert [row.name for row in rows if not row.happened.strip()] == []


def test_what_to_do_about_an_error_stands_in_the_table() -> None:
    """A literal hint is for a name whose cases differ in what to do."""
    hints = error_table.literal_hints()
    assert hints
    rows = {row.name for row in ROWS}
    assert [name for name, texts in hints.items() if name in rows and len(set(texts)) == 1] == []


def test_named_error_is_of_its_branch_and_shows_its_name() -> None:
    with raised("StillDeferred", errors.NotReady, match="^volume a: b; c$") as caught:
        raise errors.NotReady.named("StillDeferred", "volume a", why="b", hint="c")
    assert caught.value.shown() == "[StillDeferred] volume a: b; c"
    assert type(caught.value) is errors.NotReady


MOST_LINES = {"driver-author.md": 100, "runtime-author.md": 75}


def _lines_of_code(text: str) -> int:
    """Without imports, docstrings, comments and blank lines."""
    aside: set[int] = set()
    for node in ast.parse(text).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            aside |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) for number, line in numbered if number not in aside)


@pytest.mark.parametrize("page", page_programs.PAGES)
def test_program_of_page_is_the_example(page: str) -> None:
    assert page_programs.program(page) == (ROOT / "examples" / page_programs.PAGES[page]).read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("page", page_programs.PAGES)
def test_program_of_page_is_short(page: str) -> None:
    assert _lines_of_code(page_programs.program(page)) <= MOST_LINES[page]
