"""The commands of the pages are those of the program, and show what it prints."""

import importlib
import re
import tomllib
from collections import Counter
from pathlib import Path

import click
import pytest

from crust.cli import main
from crust.cli.doctor import finding
from crust.core.settings import loading
from crust.core.settings.proxy import ProxySettings
from crust.node.settings import NodeSettings
from tests.support.pages import cli_output
from tests.unit.cli.test_manifest import config, made

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"


def test_page_equals_what_the_commands_print() -> None:
    assert PAGE.read_text(encoding="utf-8") == cli_output.page(), "run `make docs-output`"


ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "specs").rglob("*.md")]
_INLINE = re.compile(r"`(?:/opt/crust/bin/)?crust ([a-z][^`]*)`")
_BLOCK = re.compile(r"^ {4,}(?:[^#\n]*\| )?(?:/opt/crust/bin/)?crust ([a-z].*)$", re.MULTILINE)
LINES = [
    (page.name, line)
    for page in PAGES
    for line in dict.fromkeys(
        match.replace("\n", " ")
        for pattern in (_INLINE, _BLOCK)
        for match in pattern.findall(page.read_text(encoding="utf-8"))
    )
]
TOML = [
    (page.name, text)
    for page in PAGES
    for text in re.findall(r"^```toml\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
]  # fmt: skip


def _unknown(line: str) -> list[str]:
    """The words of a command line, without its quoted arguments, that are no command and none of its options."""
    words = re.split(r" [|>&;]|\(", re.sub(r"'[^']*'?", "", line))[0].split()
    command: click.Command = main.main
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if command is main.main:
        return words[:1]
    group = isinstance(command, click.Group) and bool(words) and not words[0].startswith("-")
    params = command.get_params(click.Context(command))
    options = {option for param in params for option in (*param.opts, *param.secondary_opts)}
    given = [word.partition("=")[0].rstrip(",") for word in words if word.startswith("--")]
    return [word for word in given if word not in options] + words[:1] * group


def test_command_lines_of_pages_are_found() -> None:
    assert len(LINES) > 100
    assert len(TOML) >= 3


@pytest.mark.parametrize(("page", "line"), LINES)
def test_command_line_of_page_has_known_commands_and_options(page: str, line: str) -> None:
    assert _unknown(line) == [], page


@pytest.mark.parametrize("line", ["nods", "ceph fance NODE", "volumes --handlers x"])
def test_command_line_with_a_misspelt_word_is_found(line: str) -> None:
    assert len(_unknown(line)) == 1


@pytest.mark.parametrize(("page", "text"), TOML)
def test_settings_of_page_are_accepted(page: str, text: str) -> None:
    """What a fragment leaves out, as the sentence beside it says, is put in from outside."""
    tables = tomllib.loads(text)
    if "driver" in tables:
        flags: dict[str, object] = {"driver": tables["driver"]}
        node = loading.load(NodeSettings, "node", environ={}, flags=flags)
        assert len(node.driver) == len(tables["driver"])
    else:
        served = {"name": "csi.example.com", "socket": "/run/a.sock", "backend": "/run/b.sock"}
        flags = {"drivers": [served]}
        assert loading.load(ProxySettings, "proxy", toml=text, environ={}, flags=flags).kubernetes


def test_manifest_takes_the_settings_of_two_drivers_on_a_node(tmp_path: Path) -> None:
    (text,) = (text for _, text in TOML if "metrics_address" in text)
    kinds = Counter(kind for kind, _ in made(config(tmp_path, text)))
    assert (kinds["DaemonSet"], kinds["CSIDriver"]) == (1, 2)


def test_table_of_doctor_has_every_check() -> None:
    importlib.import_module("crust.cli.doctor.examine")  # registers them
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("### crust doctor\n")[2].partition("\n### ")[0]
    first = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    assert {name for cell in first for name in re.findall(r"`([\w-]+)`", cell)} == set(
        finding.CHECKS
    )
