"""Pages that list what the code has: layers, stories of the KEP, the API of authors."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from crust.cli import main

ROOT = Path(__file__).parents[3]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
BOTH = ARCHITECTURE + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LINE = re.compile(r"^\| `((?:crust|examples)/[\w/]+\.py)` \| ([^|]+) \|", re.MULTILINE)
STEPS = [
    (path, name)
    for path, names in LINE.findall(ARCHITECTURE)
    for name in re.findall(r"`([\w.]+)`", names)
]
FILES = sorted(set(re.findall(r"`((?:crust|deploy|examples|tests|specs|docs)/[\w./-]+)`", BOTH)))
IN_PROSE = [
    (name, path)
    for name, path in re.findall(r"`(\w+)`\s+(?:of|in)\s+`((?:crust|examples)/[\w/]+\.py)`", BOTH)
]


def find(path: str, name: str) -> object:
    found: object = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_every_row_of_a_request_flow_is_parsed() -> None:
    lines = [
        line for line in ARCHITECTURE.splitlines() if line.startswith(("| `crust/", "| `examples/"))
    ]
    named = [line for line in lines if line.split("|")[1].strip().endswith(".py`")]
    assert len(named) == len(LINE.findall(ARCHITECTURE))
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
    assert {
        package for package in packages if f"| `crust/{package}` |" not in ARCHITECTURE
    } == set()


TESTS = Path(__file__).parents[2]


def test_each_story_has_a_test() -> None:
    found = {
        argument.value
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for each in node.decorator_list
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.story"
        for argument in each.args
        if isinstance(argument, ast.Constant)
    }
    assert found == set(range(1, 7))


API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
MODULES = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `(crust\.[\w.]+)` \| ([^|]+) \|", API, re.MULTILINE)
}


def test_table_of_modules_is_parsed() -> None:
    section = API.partition("## Python")[2].partition("## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(MODULES) > 5


@pytest.mark.parametrize("module", MODULES)
def test_all_of_public_module_equals_its_row(module: str) -> None:
    public = importlib.import_module(module)
    assert sorted(MODULES[module]) == sorted(public.__all__)
    assert [name for name in public.__all__ if not hasattr(public, name)] == []


@pytest.mark.parametrize("module", ["crust.core.errors", "crust.core.volumes"])
def test_all_of_core_module_has_every_class(module: str) -> None:
    public = importlib.import_module(module)
    defined = {
        name
        for name, value in vars(public).items()
        if isinstance(value, type) and value.__module__ == module
    }
    assert defined <= set(public.__all__)


def test_every_command_has_its_exit_codes() -> None:
    section = API.partition("## Exit codes")[2].partition("## ")[0]
    first = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    commands = {word for cell in first for word in re.findall(r"`(?:crust )?(\w+)`", cell)}
    assert commands == set(main.main.commands)


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
