"""docs/commands.md is what the commands print."""

from pathlib import Path

from tests.support.pages import cli_output

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"


def test_page_equals_what_the_commands_print() -> None:
    assert PAGE.read_text(encoding="utf-8") == cli_output.page(), "run `make docs-output`"
