"""docs/api.md: its tables are `__all__` of the public modules and the commands; the example needs no other names."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from crust.cli import main

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
MODULES = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `(crust\.[\w.]+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
}


def test_table_of_modules_is_parsed() -> None:
    section = PAGE.partition("## Python")[2].partition("## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(MODULES) > 5


@pytest.mark.parametrize("module", MODULES)
def test_all_of_public_module_equals_its_row(module: str) -> None:
    public = importlib.import_module(module)
    assert sorted(MODULES[module]) == sorted(public.__all__)
    assert [name for name in public.__all__ if not hasattr(public, name)] == []


@pytest.mark.parametrize("module", ["crust.errors", "crust.volumes"])
def test_all_of_core_module_has_every_class(module: str) -> None:
    public = importlib.import_module(module)
    defined = {
        name
        for name, value in vars(public).items()
        if isinstance(value, type) and value.__module__ == module
    }
    assert defined <= set(public.__all__)


def test_every_command_has_its_exit_codes() -> None:
    section = PAGE.partition("## Exit codes")[2].partition("## ")[0]
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
